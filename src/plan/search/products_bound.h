// The first bound of a step's time in a search, which needs no dry run.
#pragma once

#include "plan/machine.h"
#include "plan/search_space.h"

namespace moebius {

struct ProductsBound {
  const RunSpec& run;
  const PlanMachine& machine;  // for the threads of a rank (PlanMachine::of_rank)
  const Assumptions& assume;
  int64_t ranks = 1;
};

// Returns a lower bound of a step's seconds: the products of all layers at the highest rate, attention, the copies
// that all-to-all launches for ranks of etp, and the bubble. It is 0 for a run that does not train all weights. The
// slowest rank of a pipeline takes at least the mean time of its ranks.
double products_seconds(const ProductsBound& bound, const Candidate& candidate);

}  // namespace moebius
