// The time of a step by rank and by axis of the mesh: stragglers, waiting, and exposed communication.
#pragma once

#include <array>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "train/metrics.h"
#include "train/slow_links.h"

namespace moebius {

// The bytes that a rank sent and the seconds that it waited, by axis.
struct CommCounters {
  std::array<double, kNumAxes> sent_bytes{}, seconds{};
  std::vector<LinkMeasurement> links;  // the transport's current measurements of its connections (Transport::links)
};
CommCounters comm_counters(const Mesh& mesh);  // so far
CommCounters comm_since(const Mesh& mesh, const CommCounters& before);

// Seconds of one rank's step. All but load_s are measured by the GPU's clock if the rank has a GPU.
struct RankTimes {
  double load_s = 0;       // filling micro-batches
  double passes_s = 0;     // forward and backward, with what they communicate
  double optimizer_s = 0;  // sums over ranks, norm, update
  double waiting_s = 0;    // the part of the last two spent in communication calls: exposed communication
};

struct AxisReport {
  Axis axis = Axis::tp;
  double sent_bytes = 0;       // the maximum over the ranks
  double exposed_s = 0;        // seconds of the rank that waited longest
  std::vector<double> rank_s;  // seconds that each rank waited, by world rank
};

struct RanksReport {
  std::vector<RankTimes> ranks;            // indexed by world rank
  std::vector<AxisReport> axes;            // set with several ranks, in the order of Axis
  SlowLinks slow_links;                    // names of hosts are left out
  int64_t outcome = 0;                     // the largest TrainingRun::outcome() of the ranks
  std::vector<int64_t> tokens_of_ep_rank;  // tokens that its experts got, over all layers and copies, before any drop;
                                           // none on one rank
  // On one rank, with states on the host of its GPU: bytes per second each way (train/watch/host_link.h).
  std::optional<double> host_link_bytes_per_s;
};

// Returns the report of the last step, the same on each rank. All ranks call it together; it makes one collective call.
// mine: this rank's times, without waiting_s. comm: this rank's communication in these times. layers: the step's, over
// all ranks. outcome: this rank's TrainingRun::outcome().
RanksReport gather_ranks(Engine& engine, const RankTimes& mine, const CommCounters& comm,
                         const std::vector<MoeLayerReport>& layers, int64_t outcome = 0);

// Once work of each kind has run, the first rank warns of the fallback kernels that GPUs use on any
// rank. All ranks call it together.
void warn_of_fallback_kernels(Log& log, Control& control, const Engine& engine);

nlohmann::ordered_json to_json(const RanksReport& report);
// Returns a string such as "dp_cp 1.2 MiB 0.8 ms, edp 3.0 MiB 1.1 ms": sent and exposed a step; empty on one rank.
std::string comm_text(const RanksReport& report);

}  // namespace moebius
