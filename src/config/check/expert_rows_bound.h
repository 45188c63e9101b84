// Numbers of rows that the experts of a rank get, and whether memory.expert_rows bounds them. model/moe/expert_rows.h
// says what the budget does.
#pragma once

#include <cstdint>
#include <string>

#include "config/run_spec.h"

namespace moebius {

// The ranks that share the experts of a layer, and the tokens of each that are routed at a time.
struct SharedExperts {
  int64_t ep = 1, etp = 1, num_experts = 0, top_k = 0;
  int64_t tokens = 1;
  double rows_factor = 0;  // moe.rank_rows_factor; 0: no bound
};

// A single layer may get more rows than its share even if all layers together do not. So the current layer has memory
// for this many times the rows of the budget.
inline constexpr double kRowsOfALayer = 2;
// The budget that "auto" uses where it uses one. Before there was "auto" it was the default.
inline constexpr double kAutoExpertRows = 1.25;

// Returns min(ceil(factor * even), limit); the product may overflow int64.
int64_t bounded_rows(double factor, int64_t even, int64_t limit);
int64_t even_rows(const SharedExperts& e);  // rows of a rank with balanced routing
int64_t max_rows(const SharedExperts& e);   // rows of a rank in the worst case

// Returns whether rows are in the pool of a budget. They are not without a budget, in a model without experts, where a
// rank has all experts, and where the budget reaches the worst case.
bool pools_rows(double budget, const SharedExperts& e);
// The same for a run. A recipe of a model alone counts as one sequence of the model's context.
bool pools_expert_rows(const RunSpec& s);

// Returns the budget of a run: memory.expert_rows, or what "auto" becomes. A budget takes time, since the kept rows are
// copied. So "auto" is kAutoExpertRows if rows then need at most three quarters of the memory of the worst case, and
// otherwise 0. For n rows and L MoE layers the estimate of this memory is, in elements:
//   2 F L n       for the pre-activations that the layers keep
//   (5 F + D) n   for the current layer; (3 F + D) n without a budget, since its own rows are kept
//   3 F L R       with parallel.schedule = "zb_h1" and stages, for inputs of weight gradients; R rows of the worst case
// F is the rank's share of moe_intermediate_size, and D is hidden_size. The estimate assumes that all tokens of a
// micro-batch are routed at once. L counts the layers of all stages: a rank of a 1F1B pipeline has 1/P of them, but up
// to P micro-batches in flight. The estimate ignores recompute and offload, so "auto" does not depend on them.
double expert_rows_budget(const RunSpec& s);
// Returns what "auto" became, with the reason. The text is empty where the recipe has a number, or a rank has
// all experts.
std::string expert_rows_text(const RunSpec& s);

}  // namespace moebius
