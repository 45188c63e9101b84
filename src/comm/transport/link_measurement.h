// Figures of a TCP connection that the kernel measures (TCP_INFO, linux/tcp.h).
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

// Returns the measurement of a connection, without its peer and is_filled. Nothing is sent. A figure that the kernel
// does not know is 0.
LinkMeasurement measure_link(const Socket& connection);

// num_bytes of one message arrived while a rank waited `seconds` for its rest. Returns whether num_bytes / seconds is
// the rate of the link, and not that of a short message: they are at least kLongBytes and took at least
// kManyRoundTrips. TCP begins with 14 KB in each round trip, so a message of that length takes few of them on a fast
// link. round_trip_s: 0 if unknown.
inline constexpr int64_t kLongBytes = 1 << 14;
inline constexpr double kManyRoundTrips = 16;
bool is_rate_of_link(double round_trip_s, int64_t num_bytes, double seconds);

}  // namespace moebius
