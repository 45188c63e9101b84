#include "comm/transport/link_measurement.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <limits>

namespace moebius {

LinkMeasurement measure_link(const Socket& connection) {
  LinkMeasurement measured{.crosses_machines = own_host(connection) != peer_host(connection)};
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(connection.descriptor(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return measured;
  if (size < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate) return measured;  // an old kernel
  if (info.tcpi_min_rtt != std::numeric_limits<uint32_t>::max()) measured.round_trip_s = info.tcpi_min_rtt * 1e-6;
  measured.bytes_per_s = static_cast<double>(info.tcpi_delivery_rate);
  return measured;
}

bool is_rate_of_link(double round_trip_s, int64_t num_bytes, double seconds) {
  return num_bytes >= kLongBytes && round_trip_s > 0 && seconds >= kManyRoundTrips * round_trip_s;
}

}  // namespace moebius
