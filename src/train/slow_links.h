// The slowest connections between the ranks of a run, compared with the others. A slow link between two machines makes
// no single rank slow, since all ranks wait for it. So the measurements of connections name it (Transport::links).
#pragma once

#include <array>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace moebius {

// The slowest connection by one measurement.
struct SlowLink {
  int rank = -1, peer = -1;     // its ends; -1: no measurement is known
  std::string host, peer_host;  // their machines
  double value = 0;             // the round trip in seconds, or the rate in bytes per second
  double median_of_others = 0;  // median of the other connections; 0: unknown
  bool is_known() const { return rank >= 0; }
};

struct SlowLinks {
  SlowLink round_trip;  // the longest
  SlowLink rate;        // the lowest of those that always had more bytes to send
};

// A round trip is slow if it is at least kSlowTimes times the median of the other links and at least kSlowRoundTripS,
// since times in fast networks vary more. A rate is slow if it is at most the median divided by kSlowTimes.
inline constexpr double kSlowTimes = 4, kSlowRoundTripS = 1e-3;
bool is_slow_round_trip(const SlowLink& link);
bool is_slow_rate(const SlowLink& link);

// The row that a rank contributes. For the round trip and for the rate it has: the peer of its slowest connection (-1:
// none), the value, and the median of its other connections (0: none). Connections to other machines count first.
inline constexpr int kLinkColumns = 6;
using LinkRow = std::array<double, kLinkColumns>;
LinkRow link_row(std::span<const LinkMeasurement> links);
// rows: by rank.
SlowLinks slowest_links(std::span<const LinkRow> rows);
// hosts: the machine of each rank.
void name_hosts(SlowLinks& links, const std::vector<std::string>& hosts);

// Returns {"round_trip_s": {"ranks": [1, 2], "hosts": ["a", "b"], "value": 0.1, "median_of_others":
// 0.0002, "slow": true},
//  "bytes_per_s": ...}. Unknown values are left out; null if none is known.
nlohmann::ordered_json to_json(const SlowLinks& links);
// Returns a string such as "rank 1 (a) to rank 2 (b) has a round trip of 100.2 ms, the median of the others is 0.2 ms;
// ..."; empty if nothing is known. only_slow: leaves out links that are not slow.
std::string slow_links_text(const SlowLinks& links, bool only_slow = false);

}  // namespace moebius
