// The layouts that a search considers: every one that the numbers of ranks, layers, heads and experts allow.
#pragma once

#include <string>
#include <vector>

#include "config/run_spec.h"
#include "plan/assume.h"

namespace moebius {

// Context parallelism pays where a rank keeps long sequences: with fewer tokens of each there is none.
inline constexpr int64_t kShortestOfRank = 4096;

// The tensors that a rank keeps, and their place. No choice but shard_gradients changes a bit of a run, and that one
// only the order in which gradients of several micro-batches are added.
struct MemoryChoice {
  RecomputeSpec recompute;
  OffloadSpec activations;       // memory.offload and memory.offload_fraction
  double expert_rows = 0;        // memory.expert_rows
  bool offload = false;          // optimizer.offload
  bool offload_grad = false;     // optimizer.offload_grad
  bool fsdp = false;             // parallel.fsdp
  bool shard_gradients = false;  // parallel.shard_gradients
  bool is_sharded() const { return fsdp || shard_gradients; }
  bool operator==(const MemoryChoice&) const = default;
};

// A layout of a search, and what else is chosen with it.
struct Candidate {
  ParallelSpec parallel;  // with the dispatcher, and a layout of stages where pp > 1
  int64_t micro_batch = 1;
  PrecisionRecipe recipe = PrecisionRecipe::none;
  double rows_factor = 0;  // moe.rank_rows_factor
  MemoryChoice memory;
  double step_s = 0;
};

struct SearchLimits {
  int64_t most_tp = 8;
  int64_t most_direct = 1;               // ranks that the direct dispatcher reaches: those of one host
  int64_t most_two_level = 0;            // ranks of a node of the two-level dispatcher, which is for CPUs alone
  int64_t domain_ranks = 1;              // joined by fast links, where hierarchical cp exchanges rows for heads
  std::vector<PrecisionRecipe> recipes;  // of the products, to choose from; empty: the run's own alone
  PlanSystem system = PlanSystem::moebius;
  PlanLoad load;  // rows are planned for it
  // The search chooses them; else they are the run's.
  bool chooses_rows = true, chooses_offload = true, chooses_sharding = true, chooses_activations = true;
};

// tp, cp and its exchange, pp, vpp, ep, etp, the dispatcher, micro-batches and recipes. Nothing is recomputed, and
// memory is that of the first of each of the choices below.
// Groups of candidates that share their parts (plan/part.h).
std::vector<std::vector<Candidate>> search_space(const RunSpec& run, int64_t ranks, const SearchLimits& limits);

// The budgets of memory.expert_rows to choose from, the fastest first: 0, which plans for the worst case, and the
// run's own, or a larger one where the busiest rank of the assumed load would have more rows than that.
// One value where no rank could have more than the budget: with ep = etp = 1.
std::vector<double> row_budgets(const RunSpec& run, const ParallelSpec& layout, const SearchLimits& limits);

// Where masters, moments and sums of gradients are, the fastest first. Only a GPU has another place for them.
struct OffloadChoice {
  bool offload = false, offload_grad = false;
};
std::vector<OffloadChoice> offload_choices(const RunSpec& run, const SearchLimits& limits);

// The activations that go to the host, the fastest first: the run's own, and on a GPU the inputs of layers, which are then
// recomputed, and all activations of all layers and of half of them.
std::vector<OffloadSpec> activation_choices(const RunSpec& run, const SearchLimits& limits);

// The weights and sums of gradients of layers that a rank keeps a share of, the fastest first: nothing, and each that the
// run's rules allow with these products (config/check/sharding_check.h).
struct ShardingChoice {
  bool fsdp = false, shard_gradients = false;
};
std::vector<ShardingChoice> sharding_choices(const RunSpec& run, PrecisionRecipe recipe, const SearchLimits& limits);

// The run in that layout. A GPU's steps with all-to-all, whose counts it reads back, are eager. Keys that would do nothing
// there have their defaults. With states on the host a save makes no copy of them.
RunSpec run_of(const RunSpec& run, const Candidate& candidate);
// Makes `run`, which is `of` in any layout, into run_of(of, candidate).
void set_layout(RunSpec& run, const RunSpec& of, const Candidate& candidate);
// The keys that make the recipe so: "parallel.ep=8".
std::vector<std::string> keys_of(const RunSpec& run, const Candidate& candidate);

// The names of memory.recompute that the model has a layer for, `layer` left out.
std::vector<bool RecomputeSpec::*> recompute_names(const ModelSpec& model);

// The stages of a pipeline as a layout in which the longest stage is as short as it can be, with the
// heads counted by their arithmetic. Multi-token prediction is one stage before heads that fill a stage.
// REQUIRES: 2 <= num_stages <= layers.
std::string balanced_layout(const ModelSpec& model, int64_t num_stages);

}  // namespace moebius
