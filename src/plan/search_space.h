// The layouts that a search considers: every one that the numbers of ranks, layers, heads and experts allow.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "plan/assume.h"

namespace moebius {

// The minimum number of tokens of a sequence on each cp rank. Shorter parts do not repay their exchange.
inline constexpr int64_t kMinCpTokens = 4096;

// The tensors that a rank keeps, and where it keeps them. Only shard_gradients changes results: it changes the order in
// which the gradients of several micro-batches are added.
struct MemoryChoice {
  RecomputeSpec recompute;
  OffloadSpec activations;            // memory.offload and memory.offload_fraction
  std::optional<double> expert_rows;  // memory.expert_rows
  bool offload = false;               // optimizer.offload
  bool offload_grad = false;          // optimizer.offload_grad
  std::optional<double> buffer;       // optimizer.offload_buffer, used only with offload; none: the run's
  bool fsdp = false;                  // parallel.fsdp
  bool shard_gradients = false;       // parallel.shard_gradients
  bool is_sharded() const { return fsdp || shard_gradients; }
  bool operator==(const MemoryChoice&) const = default;
};

// A layout, and the other keys that a search chooses with it.
struct Candidate {
  ParallelSpec parallel;  // includes the dispatcher, and the layers of each stage where pp > 1
  int64_t micro_batch = 1;
  PrecisionRecipe recipe = PrecisionRecipe::none;
  double rows_factor = 0;  // moe.rank_rows_factor
  MemoryChoice memory;
  double step_s = 0;
};

// The keys of a layout that --set or --sweep names. A search keeps their values; it chooses those that are empty. The
// layout of a recipe itself is no limit.
struct NamedLayout {
  std::optional<int64_t> tp, cp, pp, vpp, ep, etp, micro_batch;
  std::optional<PipelineSchedule> schedule;
  std::optional<DispatcherKind> dispatcher;
  std::optional<CpComm> cp_comm;      // of layouts with cp above 1
  std::optional<int64_t> cp_inner;    // of layouts with hierarchical cp
  std::optional<std::string> stages;  // parallel.layout
  bool recompute = false;             // memory.recompute is named
  // Returns the named keys as "parallel.ep = 7, train.micro_batch = 2"; empty if there are none.
  std::string text() const;
  // Returns whether one of tp, cp, pp, ep and etp is named.
  bool has_degrees() const;
  // Returns `p` with the named degrees, and all others 1. It has vpp and stages only if pp is named, and cp_inner only
  // if cp is named.
  ParallelSpec degrees_alone(ParallelSpec p) const;
};
// Returns the keys whose origin is --set.
NamedLayout named_layout(const RunSpec& run);

struct SearchLimits {
  int64_t max_tp = 8;
  int64_t max_direct_ranks = 1;          // ranks that the direct dispatcher reaches: those of one host
  int64_t max_two_level_ranks = 0;       // ranks of a node that the two-level dispatcher reaches
  int64_t domain_ranks = 1;              // joined by fast links, where hierarchical cp exchanges rows for heads
  std::vector<PrecisionRecipe> recipes;  // recipes of quantised products to try; empty: only the run's own
  PlanSystem system = PlanSystem::moebius;
  PlanLoad load;  // the load of experts for which rows are planned
  NamedLayout named;
  // The search chooses these keys if true; otherwise they keep the run's values.
  bool chooses_rows = true, chooses_offload = true, chooses_sharding = true, chooses_activations = true,
       chooses_schedule = true;
};

// Returns every layout: tp, cp and its method, pp, vpp, schedule, ep, etp, dispatcher, micro-batch and recipe.
// Nothing is recomputed unless memory.recompute is named. Each other memory choice is the first one of the functions
// below. The candidates of a group share their parts (plan/part.h).
std::vector<std::vector<Candidate>> search_space(const RunSpec& run, int64_t ranks, const SearchLimits& limits);

// Returns the values of memory.expert_rows to try, the fastest first; empty: "auto". The first is 0, which plans for
// the worst case. The second is the run's own, or 1.25 where that is "auto". It is larger if the busiest rank of the
// assumed load would have more rows than that. With ep = etp = 1 there is one value: no rank can have more rows than
// the budget.
std::vector<std::optional<double>> row_budgets(const RunSpec& run, const ParallelSpec& layout,
                                               const SearchLimits& limits);

// Where masters, moments and sums of gradients are kept: on the device or on the host.
struct OffloadChoice {
  bool offload = false, offload_grad = false;
};
std::vector<OffloadChoice> offload_choices(const RunSpec& run, const SearchLimits& limits);

// Returns the values of memory.offload to try, the fastest first: the run's own; on a GPU also the inputs of layers
// whose rest is recomputed, and all activations, of all layers or of half of them.
std::vector<OffloadSpec> activation_choices(const RunSpec& run, const SearchLimits& limits);

// The sharding of layers: parallel.fsdp and parallel.shard_gradients. sharding_choices() returns the values to try, the
// fastest first: none, and each that the checks of a run allow with this recipe (config/check/sharding_check.h). Where
// several ranks would keep weights on the host, all choices have fsdp. There is at least one choice.
struct ShardingChoice {
  bool fsdp = false, shard_gradients = false;
};
std::vector<ShardingChoice> sharding_choices(const RunSpec& run, int64_t ranks, PrecisionRecipe recipe,
                                             const SearchLimits& limits);

// Returns the run in that layout. On a GPU, all-to-all reads counts back, so run.graph becomes false. Keys that have no
// effect in this layout get their defaults. With optimizer states on the host, checkpoint.async becomes false.
RunSpec run_of(const RunSpec& run, const Candidate& candidate);
// Makes `run`, which is `of` in any layout, into run_of(of, candidate).
void set_layout(RunSpec& run, const RunSpec& of, const Candidate& candidate);
// Returns the candidate as recipe keys: "parallel.ep=8".
std::vector<std::string> keys_of(const RunSpec& run, const Candidate& candidate);

// Returns the names of memory.recompute that apply to the model, without `layer`.
std::vector<bool RecomputeSpec::*> recompute_names(const ModelSpec& model);

// Returns the stage layout whose longest stage is as short as possible. Heads count by their arithmetic. If the heads
// fill a stage of their own, multi-token prediction is the stage before it.
// REQUIRES: 2 <= num_stages <= layers.
std::string balanced_layout(const ModelSpec& model, int64_t num_stages);

}  // namespace moebius
