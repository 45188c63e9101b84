// The memory choice of a layout in a search: recompute, the budget of rows, states on the host, and
// sharded layers.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "plan/predict.h"
#include "plan/search_space.h"

namespace moebius {

// The limits that hold for every layout of a search.
struct MemoryLimits {
  const RunSpec& run;
  const SearchLimits& limits;
  const std::map<PrecisionRecipe, std::vector<ShardingChoice>>& sharding;
  std::vector<OffloadSpec> activations;  // activation_choices()
  std::function<Prediction(const Candidate&, PredictOptions)> timed;
  std::function<double(const Candidate&)> buffer;              // candidate_buffers()
  double link_bytes_s = 0;                                     // rate of the host link, in each direction
  std::function<double(double)> host_limit;                    // device bytes of a rank -> host bytes that it may use
  double bytes = 0;                                            // device memory limit of a rank
  double slowest_s = std::numeric_limits<double>::infinity();  // layouts that take this long or longer are dropped
  bool prunes = true;  // false: tries all choices of a layout, even if the one with the least memory does not fit
};

// Returns a function that chooses optimizer.offload_buffer of a candidate for which `run` leaves it to the plan. It is
// empty if the run names the buffer, on a CPU, and for Megatron. All arguments must outlive it.
std::function<double(const Candidate&)> candidate_buffers(PartLibrary& parts, const RunSpec& run, int64_t ranks,
                                                          const PlanMachine& machine, PlanSystem system,
                                                          double limit_bytes);

// A candidate with its memory.
struct FittedMemory {
  std::optional<Candidate> candidate;  // none: no choice fits, or those that fit are too slow
  double min_bytes = 1e300;            // the least memory of the choices that do not fit
  bool is_slower = false;              // the choices that should fit are slower than MemoryLimits::slowest_s
  int64_t num_timed = 0;               // number of predictions made
};

// Returns the candidate with the memory choice that fits and costs the least time.
FittedMemory fit_memory_of(const MemoryLimits& limits, const Candidate& candidate);

}  // namespace moebius
