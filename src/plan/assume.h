// The assumptions of a prediction that a recipe does not state: --assume KEY=VALUE.
#pragma once

#include <string>
#include <vector>

#include "plan/machine.h"

namespace moebius {

// The way in which rows travel to the experts of other ranks. of_recipe: as the engine's own dispatcher does.
// alltoall sends a row for each chosen expert; deepep and hybridep send a token once to each rank
// that has some of them, and once to each domain across; so would a one-sided dispatcher, direct.
enum class PlanDispatcher : int { of_recipe, allgather, alltoall, deepep, hybridep, direct };
// of_recipe: run.graph of a run of Moebius, and none of Megatron.
enum class PlanGraphs : int { of_recipe, none, partial, full };
enum class PlanPrecision : int { of_recipe, fp8_block, fp8_tensor, mxfp8, nvfp4 };
// The rows that Megatron keeps of an MoE layer for its weights' gradient. memory_efficient multiplies by a token's
// weight before the second product, plain after it, and so keeps the experts' outputs (arXiv 2603.07685).
enum class PlanPermutation : int { memory_efficient, plain };

// Megatron may compute more anew than memory.recompute names: the experts' activation (its moe_act), or the whole MoE
// layer with its exchange (its moe).
enum class PlanRecompute : int { of_recipe, activation, moe };

// The rows that the busiest rank of ep has, over the mean.
struct PlanLoad {
  double zipf = 0;            // > 0: popularity of experts by rank^-zipf
  double busiest_expert = 0;  // > 0: rows of the busiest expert over the mean, as a run measured
  double stated = 0;          // > 0: the answer itself
  std::string text = "balanced";
  // experts: of the layer; on ep ranks.
  double busiest_rank(int64_t experts, int64_t ep) const;
};

struct Assumptions {
  PlanSystem system = PlanSystem::moebius;
  PlanDispatcher dispatcher = PlanDispatcher::of_recipe;
  PlanGraphs graphs = PlanGraphs::of_recipe;
  PlanPrecision precision = PlanPrecision::of_recipe;
  PlanPermutation permutation = PlanPermutation::memory_efficient;
  PlanRecompute recompute = PlanRecompute::of_recipe;
  bool merged_overlap = false;  // expert_overlap = merged: the exchange of rows hides under the other pass
  PlanLoad load;
  double jitter = -1;    // standard deviation of a rank's time of a step, over its mean; below 0: the machine's
  double straggler = 0;  // how much longer the slowest rank takes, beside jitter
  double tokens = 0;     // to be trained, for days and GPU-hours; 0: not asked

  // Returns the factor of the slowest of so many ranks.
  double slowest_of(int64_t ranks, const PlanMachine& machine) const;
};

// Reads KEY=VALUE, one each. Keys: system, dispatcher, graphs, expert_overlap, precision, permutation, recompute,
// load, jitter, straggler, tokens. load = balanced | zipf:S | rank:X | FILE, a run's metrics.jsonl. X: rows of the
// busiest rank over the mean.
// Throws Error{usage} for an unknown key or value with the known ones. Throws Error{io}, Error{input} for FILE.
Assumptions parse_assumptions(const std::vector<std::string>& texts);
std::string to_string(const Assumptions& a);

}  // namespace moebius
