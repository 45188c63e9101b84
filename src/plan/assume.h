// The assumptions of a prediction that a recipe does not state: --assume KEY=VALUE.
#pragma once

#include <string>
#include <vector>

#include "plan/machine.h"

namespace moebius {

// The dispatcher that is assumed. from_recipe: the one that the engine would use. alltoall sends a row for each chosen
// expert. deepep, hybridep and direct send a token once to each rank that has any of its experts, and once to each
// other domain.
enum class PlanDispatcher : int { from_recipe, allgather, alltoall, deepep, hybridep, direct };
// from_recipe: run.graph of a run of Moebius, and none of Megatron.
enum class PlanGraphs : int { from_recipe, none, partial, full };
enum class PlanPrecision : int { from_recipe, fp8_block, fp8_tensor, mxfp8, nvfp4 };
// The place where Megatron multiplies rows of experts by their routing weights. memory_efficient multiplies before the
// second product. plain multiplies after it, and so keeps the experts' outputs for backward (arXiv 2603.07685).
enum class PlanPermutation : int { memory_efficient, plain, fused };

// Megatron can recompute more than memory.recompute names: the activation of the experts (its moe_act), or the whole
// MoE layer with its exchange (its moe).
enum class PlanRecompute : int { from_recipe, activation, moe };

// Megatron's cross_entropy_fusion_impl: a kernel of Transformer Engine on logits in bf16, or compiled ops in f32.
enum class PlanLoss : int { te, native };

// The imbalance: the rows of the busiest rank of ep, relative to the mean.
struct PlanLoad {
  double zipf = 0;            // > 0: popularity of experts by rank^-zipf
  double busiest_expert = 0;  // > 0: rows of the busiest expert over the mean, as a run measured
  double stated = 0;          // > 0: the imbalance itself (load=rank:X)
  // Rows of each expert of each MoE layer, as a run measured. They count for a model with as many experts.
  std::vector<std::vector<double>> measured;
  std::string text = "balanced";
  // Returns the imbalance of a layer with `experts` experts on `ep` ranks.
  double busiest_rank(int64_t experts, int64_t ep) const;
};

struct Assumptions {
  PlanSystem system = PlanSystem::moebius;
  PlanDispatcher dispatcher = PlanDispatcher::from_recipe;
  PlanGraphs graphs = PlanGraphs::from_recipe;
  PlanPrecision precision = PlanPrecision::from_recipe;
  PlanPermutation permutation = PlanPermutation::memory_efficient;
  PlanRecompute recompute = PlanRecompute::from_recipe;
  bool merged_overlap = false;  // expert_overlap = merged: rows are exchanged during a pass of another micro-batch
  bool tp_overlap = false;      // tp_overlap = products: Megatron's tp_comm_overlap
  PlanLoss cross_entropy = PlanLoss::te;
  PlanLoad load;
  double jitter = -1;    // standard deviation of a rank's step time, relative to its mean; below 0: the machine's
  double straggler = 0;  // the additional relative time of the slowest rank, besides jitter
  double tokens = 0;     // tokens of the whole run, for its days and GPU-hours; 0: these are not printed

  // Returns the step time of the slowest of these ranks, relative to the mean.
  double slowest_of(int64_t ranks, const PlanMachine& machine) const;
};

// Parses one KEY=VALUE from each text. Keys: system, dispatcher, graphs, expert_overlap, precision, permutation,
// recompute, tp_overlap, cross_entropy, load, jitter, straggler, tokens. load = balanced | zipf:S | rank:X | FILE, a
// run's metrics.jsonl. X: rows of the busiest rank over the mean.
// Throws Error{usage} for an unknown key or value, with the known ones; Error{io} or Error{input} for FILE.
Assumptions parse_assumptions(const std::vector<std::string>& texts);
std::string to_string(const Assumptions& a);

}  // namespace moebius
