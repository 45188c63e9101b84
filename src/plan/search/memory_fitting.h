// The choice of what a layout of a search keeps, and where: recompute, the budget of rows, states on the host, and
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
  std::function<double(double)> host_limit;  // bytes that a rank with so many on its device may have of its host
  double bytes = 0;                          // that a rank may use
  double slowest_s = std::numeric_limits<double>::infinity();  // a layout that takes as long need not be found
  bool prunes = true;  // false: all choices of a layout are looked at, even if the one that needs least does not fit
};

// A candidate with its memory.
struct FittedMemory {
  std::optional<Candidate> candidate;  // none: nothing fits, or what fits is too slow
  double least_bytes = 1e300;          // of what did not fit
  bool is_slower = false;              // what should fit is slower than MemoryLimits::slowest_s
  int64_t num_timed = 0;               // predictions made
};

// The candidate with the choice that fits and costs least.
FittedMemory fit_memory_of(const MemoryLimits& limits, const Candidate& candidate);

}  // namespace moebius
