// Numbers of rows that the experts of a rank get, and whether memory.expert_rows bounds them. model/moe/expert_rows.h
// says what the budget does.
#pragma once

#include <cstdint>

#include "config/run_spec.h"

namespace moebius {

// The ranks that share the experts of a layer, and the tokens of each that are routed at a time.
struct SharedExperts {
  int64_t ep = 1, etp = 1, num_experts = 0, top_k = 0;
  int64_t tokens = 1;
  double rows_factor = 0;  // moe.rank_rows_factor; 0: no bound
};

// Returns ceil(factor * even), at most `most`; the product may exceed every integer.
int64_t bounded_rows(double factor, int64_t even, int64_t most);
int64_t even_rows(const SharedExperts& e);  // rows of a rank if experts are chosen evenly
int64_t max_rows(const SharedExperts& e);   // rows of a rank if its experts are chosen as often as they can be

// Returns whether rows are in the pool of a budget. They are not without a budget, in a model without experts, where a
// rank has all experts, and where the budget reaches the worst case.
bool pools_rows(double budget, const SharedExperts& e);
// The same for a run. A recipe of a model alone counts as one sequence of the model's context.
bool pools_expert_rows(const RunSpec& s);

}  // namespace moebius
