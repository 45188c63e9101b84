#include "plan/search_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>

#include "config/check/batch_split_check.h"
#include "config/check/expert_rows_bound.h"
#include "config/check/sharding_check.h"
#include "config/dispatcher_choice.h"
#include "config/recipe/memory_keys.h"
#include "core/error.h"
#include "plan/memory/fit_memory.h"

namespace moebius {
namespace {

constexpr int64_t kMicroBatches[] = {1, 2, 3, 4, 6, 8, 12, 16};
constexpr int64_t kVirtual[] = {1, 2, 3, 4, 6, 8, 12};
// The rows that all-to-all plans for, relative to the even share: a balanced run's rows, with a margin.
constexpr double kRowsFactor = 1.5;
// The margin above the rows of the busiest rank, whose load changes from step to step.
constexpr double kRowsMargin = 1.25;

// Returns the divisors of n up to `most`, ascending.
std::vector<int64_t> divisors(int64_t n, int64_t most) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    if (d <= most) all.push_back(d);
    if (d * d != n && n / d <= most) all.push_back(n / d);
  }
  std::sort(all.begin(), all.end());
  return all;
}

// Returns the divisors of n up to `most`; or only the named degree, if it divides n.
std::vector<int64_t> degrees(int64_t n, int64_t most, const std::optional<int64_t>& named) {
  if (!named) return divisors(n, most);
  return *named >= 1 && n % *named == 0 ? std::vector{*named} : std::vector<int64_t>{};
}

// Returns the values to try: all, or only the named one.
template <size_t kNum>
std::vector<int64_t> values(const int64_t (&all)[kNum], const std::optional<int64_t>& named) {
  return named && *named >= 1 ? std::vector{*named} : std::vector(std::begin(all), std::end(all));
}

bool is_power_of_two(int64_t n) { return (n & (n - 1)) == 0; }

// Returns the rows to plan for, relative to the even share: those of the busiest rank with a margin, rounded up to 1/4.
double rows_with_margin(const RunSpec& run, const ParallelSpec& p, const SearchLimits& limits) {
  const double busiest = limits.load.busiest_rank(run.model.num_experts, p.ep);
  return std::ceil(4 * kRowsMargin * busiest) / 4;
}

class Space {
 public:
  Space(const RunSpec& run, int64_t ranks, const SearchLimits& limits) : run_(run), ranks_(ranks), limits_(limits) {
    if (limits_.recipes.empty()) limits_.recipes = {run.precision.recipe};
    for (const PrecisionRecipe recipe : limits_.recipes)
      sharding_.push_back(sharding_choices(run_, ranks_, recipe, limits_).front());
  }

  std::vector<std::vector<Candidate>> all() {
    const ModelSpec& m = run_.model;
    const NamedLayout& named = limits_.named;
    const int64_t max_cp = std::max<int64_t>(1, run_.train.seq_len / kMinCpTokens);
    for (const int64_t pp : degrees(ranks_, m.num_layers, named.pp)) {
      for (const int64_t tp : degrees(ranks_ / pp, limits_.max_tp, named.tp)) {
        if (m.num_heads % tp != 0 || m.num_kv_heads % tp != 0) continue;
        for (const int64_t cp : degrees(ranks_ / (pp * tp), max_cp, named.cp))
          if (is_power_of_two(cp) || named.cp) add_experts(layout_of(tp, cp, pp));
      }
    }
    std::vector<std::vector<Candidate>> groups;
    for (auto& [key, group] : groups_) groups.push_back(std::move(group));
    return groups;
  }

 private:
  // The rest is the run's: sums, overlap, and exchanges that the search does not choose.
  ParallelSpec layout_of(int64_t tp, int64_t cp, int64_t pp) const {
    ParallelSpec p = run_.parallel;
    p.tp = tp;
    p.cp = cp;
    p.pp = pp;
    p.ep = p.etp = p.cp_inner = 1;
    if (cp > 1) return p;
    p.cp_comm = CpComm::allgather;
    p.dynamic_cp = false;
    return p;
  }

  void add_experts(ParallelSpec p) {
    const ModelSpec& m = run_.model;
    const NamedLayout& named = limits_.named;
    if (m.num_moe_layers() == 0) {
      if (named.ep.value_or(1) == 1 && named.etp.value_or(1) == 1) add_dispatchers(p);
      return;
    }
    const int64_t here = ranks_ / p.pp;
    for (const int64_t etp : degrees(here, limits_.max_tp, named.etp)) {
      for (const int64_t ep : degrees(m.num_experts, here, named.ep)) {
        if (here % (etp * ep) != 0 || m.moe_intermediate_size % etp != 0) continue;
        p.ep = ep;
        p.etp = etp;
        add_dispatchers(p);
      }
    }
  }

  void add_dispatchers(ParallelSpec p) {
    const bool exchanges = p.ep * p.etp > 1;
    std::vector<DispatcherKind> kinds{DispatcherKind::automatic};
    if (exchanges) kinds = {DispatcherKind::allgather, DispatcherKind::alltoall};
    if (exchanges && p.ep * p.etp <= limits_.max_direct_ranks) kinds.push_back(DispatcherKind::direct);
    if (p.ranks_per_node <= limits_.max_two_level_ranks && has_nodes(p.ep, p.etp, p.ranks_per_node))
      kinds.push_back(DispatcherKind::two_level);
    // The exchange of rows by other software does not depend on our dispatcher.
    if (exchanges && limits_.system == PlanSystem::megatron)
      kinds = {DispatcherKind::alltoall};
    else if (exchanges && limits_.named.dispatcher)
      kinds = {*limits_.named.dispatcher};
    if (!exchanges) p.expert_overlap = ExpertOverlap::none;
    const ExpertOverlap overlap = p.expert_overlap;  // batch_split is refused with other dispatchers than direct
    for (const DispatcherKind kind : kinds) {
      if (limits_.named.dispatcher.value_or(kind) != kind) continue;
      p.dispatcher = kind;
      if (kind != DispatcherKind::direct && overlap == ExpertOverlap::batch_split)
        p.expert_overlap = ExpertOverlap::layer;
      add_exchanges(p);
      p.expert_overlap = overlap;
    }
  }

  // Adds each method of context parallelism; run.check() refuses those that the heads do not allow.
  void add_exchanges(ParallelSpec p) {
    if (p.cp == 1) return add_batches(p);
    const auto is_tried = [&](CpComm comm) { return limits_.named.cp_comm.value_or(comm) == comm; };
    for (const CpComm comm : {CpComm::allgather, CpComm::ring, CpComm::alltoall}) {
      p.cp_comm = comm;
      if (is_tried(comm)) add_batches(p);
    }
    p.cp_comm = CpComm::hierarchical;
    p.cp_inner = limits_.named.cp_inner ? *limits_.named.cp_inner : inner_ranks(p);
    if (p.cp_inner > 1 && is_tried(p.cp_comm)) add_batches(p);
  }

  // Returns the largest cp_inner that fits in a domain and divides the heads; 1: hierarchical is not possible.
  int64_t inner_ranks(const ParallelSpec& p) const {
    const int64_t most = std::min(p.cp / 2, limits_.domain_ranks / p.tp);
    int64_t inner = 1;
    for (const int64_t n : divisors(p.cp, most))
      if (run_.model.num_kv_heads % (p.tp * n) == 0) inner = n;
    return inner;
  }

  // Returns whether the kernels of a recipe take the parts of rows that batch_split needs (check_batch_split()).
  bool can_split(PrecisionRecipe recipe, int64_t etp) const {
    const bool needs_hopper = run_.device == DeviceKind::cuda && run_.precision.compute == DType::bf16;
    return recipe == PrecisionRecipe::none &&
           (!needs_hopper || (run_.kernels == KernelChoice::automatic && takes_split_widths(run_.model, etp)));
  }

  void add_batches(ParallelSpec p) {
    const OffloadChoice offload = offload_choices(run_, limits_)[0];
    const NamedLayout& named = limits_.named;
    MemoryChoice memory{.recompute = run_.memory.recompute,
                        .activations = run_.memory.offload,
                        .expert_rows = row_budgets(run_, p, limits_)[0],
                        .offload = offload.offload,
                        .offload_grad = offload.offload_grad};
    for (const int64_t vpp : values(kVirtual, named.vpp)) {
      if (p.pp * vpp > run_.model.num_layers || (p.pp == 1 && vpp > 1)) break;
      p.vpp = vpp;
      p.layout = named.stages ? *named.stages : p.pp > 1 ? layout_of_stages(p.pp * vpp) : "";
      for (const PipelineSchedule schedule : schedules(p)) {
        p.schedule = schedule;
        add_micro_batches(p, memory);
      }
    }
  }

  // Returns the schedules to try. zb_h1 needs sums in f32 (check_zb_h1()).
  std::vector<PipelineSchedule> schedules(const ParallelSpec& p) const {
    constexpr PipelineSchedule zb_h1 = PipelineSchedule::zb_h1;
    if (const PipelineSchedule own = run_.parallel.schedule; !limits_.chooses_schedule)
      return own == zb_h1 && p.vpp > 1 ? std::vector<PipelineSchedule>{} : std::vector{own};
    const bool may_split = p.pp > 1 && p.vpp == 1 && run_.optimizer.grad == GradFormat::f32;
    std::vector<PipelineSchedule> all{PipelineSchedule::one_f_one_b};
    if (may_split) all.push_back(zb_h1);
    return all;
  }

  void add_micro_batches(const ParallelSpec& p, MemoryChoice memory) {
    const int64_t dp = ranks_ / (p.tp * p.cp * p.pp);
    for (const int64_t micro_batch : values(kMicroBatches, limits_.named.micro_batch)) {
      if (run_.train.global_batch % (micro_batch * dp) != 0) continue;
      if (p.vpp > 1 && run_.train.global_batch / (micro_batch * dp) % p.pp != 0) continue;
      for (size_t r = 0; r < limits_.recipes.size(); ++r) {
        const PrecisionRecipe recipe = limits_.recipes[r];
        memory.fsdp = sharding_[r].fsdp;
        memory.shard_gradients = sharding_[r].shard_gradients;
        ParallelSpec layout = p;
        if (p.expert_overlap == ExpertOverlap::batch_split && !can_split(recipe, p.etp))
          layout.expert_overlap = ExpertOverlap::layer;
        groups_[key_of(layout, micro_batch, recipe)].push_back({.parallel = layout,
                                                                .micro_batch = micro_batch,
                                                                .recipe = recipe,
                                                                .rows_factor = rows_factor(p),
                                                                .memory = memory});
      }
    }
  }

  const std::string& layout_of_stages(int64_t num_stages) {
    std::string& layout = layouts_[num_stages];
    if (layout.empty()) layout = balanced_layout(run_.model, num_stages);
    return layout;
  }

  // Only all-to-all has a bound on the rows of a rank.
  double rows_factor(const ParallelSpec& p) const {
    if (p.dispatcher != DispatcherKind::alltoall) return 0;
    if (run_.moe.rank_rows_factor > 0) return run_.moe.rank_rows_factor;
    return std::max(kRowsFactor, rows_with_margin(run_, p, limits_));
  }

  // Candidates with the same number of tokens per rank form a group: they share parts (plan/cost/composed_part.h).
  static std::string key_of(const ParallelSpec& p, int64_t micro_batch, PrecisionRecipe recipe) {
    const int64_t common = std::gcd(p.cp, micro_batch);
    return fmt::format("{} {} {} {}", p.tp, p.cp / common, micro_batch / common, static_cast<int>(recipe));
  }

  const RunSpec& run_;
  int64_t ranks_;
  SearchLimits limits_;
  std::vector<ShardingChoice> sharding_;    // [recipe]: the fastest choice
  std::map<int64_t, std::string> layouts_;  // by the number of stages
  std::map<std::string, std::vector<Candidate>> groups_;
};

const char* name_of(CpComm comm) {
  switch (comm) {
    case CpComm::allgather:
      return "allgather";
    case CpComm::ring:
      return "ring";
    case CpComm::alltoall:
      return "alltoall";
    case CpComm::hierarchical:
      return "hierarchical";
  }
  MOEBIUS_FAIL(internal, "search: an exchange of cp that is not known");
}

// A head's arithmetic, in layers: one token's parameters of both.
double head_in_layers(const ModelSpec& m) {
  const double head = static_cast<double>(m.vocab_size * m.hidden_size);
  const double tables = head * (m.tie_word_embeddings ? 1 : 2);
  const double layers = static_cast<double>(m.num_active_parameters()) - tables;
  return head * static_cast<double>(m.num_layers_and_mtp()) / layers;
}

}  // namespace

NamedLayout named_layout(const RunSpec& run) {
  const auto is_named = [&](const char* key) {
    const auto found = run.provenance.find(key);
    return found != run.provenance.end() && found->second == "--set";
  };
  const auto if_named = [&](const char* key, const auto& value) {
    return is_named(key) ? std::optional(value) : std::nullopt;
  };
  const ParallelSpec& p = run.parallel;
  return {.tp = if_named("parallel.tp", p.tp),
          .cp = if_named("parallel.cp", p.cp),
          .pp = if_named("parallel.pp", p.pp),
          .vpp = if_named("parallel.vpp", p.vpp),
          .ep = if_named("parallel.ep", p.ep),
          .etp = if_named("parallel.etp", p.etp),
          .micro_batch = if_named("train.micro_batch", run.train.micro_batch),
          .schedule = if_named("parallel.schedule", p.schedule),
          .dispatcher =
              p.dispatcher == DispatcherKind::automatic ? std::nullopt : if_named("parallel.dispatcher", p.dispatcher),
          .cp_comm = if_named("parallel.cp_comm", p.cp_comm),
          .cp_inner = if_named("parallel.cp_inner", p.cp_inner),
          .stages = if_named("parallel.layout", p.layout),
          .recompute = is_named("memory.recompute") && !run.memory.automatic};
}

bool NamedLayout::has_degrees() const { return tp || cp || pp || ep || etp; }

ParallelSpec NamedLayout::degrees_alone(ParallelSpec p) const {
  p.tp = tp.value_or(1);
  p.cp = cp.value_or(1);
  p.pp = pp.value_or(1);
  p.vpp = pp ? vpp.value_or(1) : 1;
  p.ep = ep.value_or(1);
  p.etp = etp.value_or(1);
  p.cp_inner = cp ? cp_inner.value_or(1) : 1;
  p.layout = pp ? stages.value_or("") : "";
  return p;
}

std::string NamedLayout::text() const {
  std::string text;
  const auto add = [&](const char* key, const auto& value) {
    if (value) text += fmt::format("{}{} = {}", text.empty() ? "" : ", ", key, *value);
  };
  add("parallel.tp", tp);
  add("parallel.cp", cp);
  add("parallel.pp", pp);
  add("parallel.vpp", vpp);
  if (schedule) add("parallel.schedule", std::optional(fmt::format("\"{}\"", moebius::name_of(*schedule))));
  add("parallel.ep", ep);
  add("parallel.etp", etp);
  add("train.micro_batch", micro_batch);
  if (dispatcher) add("parallel.dispatcher", std::optional(fmt::format("\"{}\"", moebius::name_of(*dispatcher))));
  if (cp_comm) add("parallel.cp_comm", std::optional(fmt::format("\"{}\"", name_of(*cp_comm))));
  add("parallel.cp_inner", cp_inner);
  if (stages) add("parallel.layout", std::optional(fmt::format("\"{}\"", *stages)));
  if (recompute) text += fmt::format("{}memory.recompute", text.empty() ? "" : ", ");
  return text;
}

std::vector<std::vector<Candidate>> search_space(const RunSpec& run, int64_t ranks, const SearchLimits& limits) {
  return Space(run, ranks, limits).all();
}

std::vector<std::optional<double>> row_budgets(const RunSpec& run, const ParallelSpec& p, const SearchLimits& limits) {
  if (p.ep * p.etp == 1) return {MemorySpec{}.expert_rows};
  if (!limits.chooses_rows) return {run.memory.expert_rows};
  const double own = run.memory.expert_rows.value_or(kAutoExpertRows);
  const double busiest = limits.load.busiest_rank(run.model.num_experts, p.ep);
  return {0, own >= busiest ? own : rows_with_margin(run, p, limits)};
}

std::vector<OffloadChoice> offload_choices(const RunSpec& run, const SearchLimits& limits) {
  const OptimizerSpec& o = run.optimizer;
  if (!limits.chooses_offload || run.device != DeviceKind::cuda) return {{o.offload, o.offload_grad}};
  if (o.grad == GradFormat::f32 || o.fuse_grad) return {{false, false}, {true, false}};
  return {{false, false}, {true, false}, {true, true}};
}

std::vector<OffloadSpec> activation_choices(const RunSpec& run, const SearchLimits& limits) {
  std::vector<OffloadSpec> choices{run.memory.offload};
  if (!limits.chooses_activations || run.device != DeviceKind::cuda) return choices;
  choices.emplace_back().layer_input = true;
  for (const double fraction : {1.0, 0.5}) {
    choices.emplace_back().tensors.layer = true;
    choices.back().fraction = fraction;
  }
  return choices;
}

std::vector<ShardingChoice> sharding_choices(const RunSpec& of, int64_t ranks, PrecisionRecipe recipe,
                                             const SearchLimits& limits) {
  if (!limits.chooses_sharding) return {{of.parallel.fsdp, of.parallel.shard_gradients}};
  RunSpec run = of;
  run.precision.recipe = recipe;
  std::vector<ShardingChoice> choices;
  for (const ShardingChoice choice : {ShardingChoice{}, {true, false}, {false, true}, {true, true}}) {
    if (of.offload_weights && ranks > 1 && !choice.fsdp) continue;  // check_offload_weights()
    run.parallel.fsdp = choice.fsdp;
    run.parallel.shard_gradients = choice.shard_gradients;
    try {
      check_sharding(run);
      choices.push_back(choice);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::usage) throw;
    }
  }
  if (choices.empty()) choices.emplace_back();  // the checks of a layout say why it is refused
  return choices;
}

RunSpec run_of(const RunSpec& of, const Candidate& c) {
  RunSpec run = of;
  set_layout(run, of, c);
  return run;
}

void set_layout(RunSpec& run, const RunSpec& of, const Candidate& c) {
  run.parallel = c.parallel;
  run.train.micro_batch = c.micro_batch;
  run.precision.recipe = c.recipe;
  run.moe.rank_rows_factor = c.rows_factor;
  run.memory = of.memory;
  run.memory.recompute = c.memory.recompute;
  run.memory.offload = c.memory.activations;
  run.memory.expert_rows = c.memory.expert_rows;
  leave_out_recomputed(run.memory);
  // The pool of rows remains on the device.
  if (expert_rows_budget(run) > 0 && c.parallel.ep * c.parallel.etp > 1) run.memory.offload.tensors.expert_up = false;
  if (!run.memory.offload.any()) run.memory.offload = {};
  run.optimizer.offload = c.memory.offload;
  run.optimizer.offload_buffer = c.memory.buffer ? c.memory.buffer : of.optimizer.offload_buffer;
  if (!c.memory.offload) run.optimizer.offload_buffer = 0;
  run.optimizer.offload_grad = c.memory.offload_grad;
  run.checkpoint.async_save = of.checkpoint.async_save && (!c.memory.offload || of.optimizer.offload);
  run.parallel.fsdp = c.memory.fsdp;
  run.parallel.shard_gradients = c.memory.shard_gradients;
  run.graph = of.graph && c.parallel.dispatcher != DispatcherKind::alltoall;
}

// The keys of the layout are always in the list; other keys only if their values differ from the recipe's.
std::vector<std::string> keys_of(const RunSpec& run, const Candidate& c) {
  const ParallelSpec &p = c.parallel, &own = run.parallel;
  const RunSpec found = run_of(run, c);
  std::vector<std::string> set{fmt::format("parallel.tp={}", p.tp),
                               fmt::format("parallel.cp={}", p.cp),
                               fmt::format("parallel.pp={}", p.pp),
                               fmt::format("parallel.vpp={}", p.vpp),
                               fmt::format("parallel.ep={}", p.ep),
                               fmt::format("parallel.etp={}", p.etp),
                               fmt::format("train.micro_batch={}", c.micro_batch),
                               fmt::format("memory.recompute={}", recompute_list(c.memory.recompute)),
                               fmt::format("parallel.layout=\"{}\"", p.layout),
                               fmt::format("parallel.dispatcher=\"{}\"", moebius::name_of(p.dispatcher))};
  const auto add = [&](bool is_new, const std::string& text) {
    if (is_new) set.push_back(text);
  };
  add(own.schedule != p.schedule, fmt::format("parallel.schedule=\"{}\"", moebius::name_of(p.schedule)));
  add(p.cp > 1 || own.cp_comm != p.cp_comm, fmt::format("parallel.cp_comm=\"{}\"", name_of(p.cp_comm)));
  add(own.cp_inner != p.cp_inner, fmt::format("parallel.cp_inner={}", p.cp_inner));
  add(own.dynamic_cp != p.dynamic_cp, "parallel.dynamic_cp=false");
  add(own.expert_overlap != p.expert_overlap,
      fmt::format("parallel.expert_overlap=\"{}\"", p.expert_overlap == ExpertOverlap::layer ? "layer" : "none"));
  add(run.precision.recipe != c.recipe, fmt::format("precision.recipe=\"{}\"", moebius::name_of(c.recipe)));
  add(run.graph != found.graph, "run.graph=false");
  add(run.moe.rank_rows_factor != c.rows_factor, fmt::format("moe.rank_rows_factor={}", c.rows_factor));
  add(run.memory.expert_rows != c.memory.expert_rows, c.memory.expert_rows
                                                          ? fmt::format("memory.expert_rows={}", *c.memory.expert_rows)
                                                          : "memory.expert_rows=\"auto\"");
  const OffloadSpec &moved = found.memory.offload, &asked = run.memory.offload;
  add(moved.fraction != asked.fraction, fmt::format("memory.offload_fraction={}", moved.fraction));
  add(moved != asked, fmt::format("memory.offload={}", offload_list(moved, run.offload_weights)));
  add(run.optimizer.offload != c.memory.offload, fmt::format("optimizer.offload={}", c.memory.offload));
  add(run.optimizer.offload_grad != c.memory.offload_grad,
      fmt::format("optimizer.offload_grad={}", c.memory.offload_grad));
  add(c.memory.buffer.has_value(), fmt::format("optimizer.offload_buffer={}", c.memory.buffer.value_or(0)));
  add(own.fsdp != c.memory.fsdp, fmt::format("parallel.fsdp={}", c.memory.fsdp));
  add(own.shard_gradients != c.memory.shard_gradients,
      fmt::format("parallel.shard_gradients={}", c.memory.shard_gradients));
  add(run.checkpoint.async_save != found.checkpoint.async_save, "checkpoint.async=false");
  return set;
}

// A name whose layers the model does not have would be refused, so it is left out.
std::vector<bool RecomputeSpec::*> recompute_names(const ModelSpec& m) {
  std::vector<bool RecomputeSpec::*> names{&RecomputeSpec::norm, &RecomputeSpec::qkv, &RecomputeSpec::attention};
  if (m.kv_lora_rank > 0) names.push_back(&RecomputeSpec::mla_up_proj);
  if (m.num_moe_layers() < m.num_layers) names.push_back(&RecomputeSpec::mlp);
  if (m.shared_intermediate_size > 0) names.push_back(&RecomputeSpec::shared_expert);
  if (m.num_moe_layers() > 0) names.push_back(&RecomputeSpec::expert_up);
  return names;
}

// Chooses the number of layers in the last stage so that the longest stage is as short as possible, and divides the
// other layers evenly.
std::string balanced_layout(const ModelSpec& m, int64_t num_stages) {
  const int64_t S = num_stages, mtp = m.num_mtp_layers;
  const double heads = head_in_layers(m) * static_cast<double>(1 + mtp), all = static_cast<double>(m.num_layers + mtp);
  const bool has_head_stage =
      mtp > 0 && S > 2 && heads > (all + heads) / static_cast<double>(S);  // L has a stage of its own
  const int64_t layers = m.num_layers + (has_head_stage ? mtp : 0);
  int64_t last = 0;
  for (int64_t n = 1; n < layers && !has_head_stage; ++n) {
    const auto longest = [&](int64_t in_last) {
      return std::max(static_cast<double>(div_ceil(layers - in_last, S - 1)),
                      static_cast<double>(in_last + mtp) + heads);
    };
    if (longest(n) <= longest(last) && layers - n >= S - 1) last = n;
  }
  const int64_t before = layers - last, each = div_ceil(before, S - 1), shorter = each * (S - 1) - before;
  std::string text = "E";
  for (int64_t s = 0; s < S; ++s) {
    const bool is_last = s == S - 1, has_mtp = has_head_stage ? s == S - 2 : is_last;
    const int64_t units = is_last ? last : s < shorter ? each - 1 : each;
    const int64_t in_stage = units - (has_head_stage && has_mtp ? mtp : 0);
    if (s > 0) text += " |";
    if (in_stage > 0) text += fmt::format(" t*{}", in_stage);
    if (has_mtp && mtp > 0)
      text += fmt::format("{}{}", in_stage > 0 ? "" : " ", std::string(static_cast<size_t>(mtp), 'm'));
    if (is_last) text += " L";
  }
  return text;
}

}  // namespace moebius
