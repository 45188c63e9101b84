#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <compare>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <queue>

#include "config/run_check.h"
#include "core/thread_pool.h"
#include "parallel/optim/optimizer.h"
#include "plan/memory/state_buffer.h"
#include "plan/print.h"
#include "plan/search/memory_fitting.h"
#include "plan/search/passes_bound.h"
#include "plan/search/phase_difference.h"
#include "plan/search/products_bound.h"

namespace moebius {
namespace {

constexpr int64_t kMaxTp = 8;  // by default
// The number of layouts whose passes are timed at once, and whose memory is chosen at once. They do not depend on the
// number of threads, so the result does not either. The last batch may time a few layouts in vain.
constexpr int64_t kTimed = 128, kRound = 16;
// A bound adds the times of composed parts (plan/cost/composed_part.h), whose last digits differ from a dry run's.
constexpr double kRounding = 1 - 1e-9;

PrecisionRecipe recipe_of(const std::string& name) {
  std::string known;
  for (const auto& [text, recipe] : kPrecisionRecipeNames) {
    if (name == text) return recipe;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", text);
  }
  MOEBIUS_FAIL(usage, "--recipes: expected some of {}; got \"{}\"", known, name);
}

class Search {
 public:
  Search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine, const Assumptions& assume,
         const SearchOptions& options)
      : parts_(parts),
        asked_(run),
        run_(run_on(run, machine, assume.system)),
        ranks_(ranks),
        machine_(machine),
        assume_(assume),
        options_(options),
        pool_(options.threads) {
    run_.model.check();
    if (run_.train.seq_len == 0) run_.train.seq_len = run_.model.max_position_embeddings;
    limits_ = limits();
    if (run_.train.micro_batch == 0) run_.train.micro_batch = 1;  // for a recipe that has only a model
    check_policies(run_);  // an error that no layout avoids is reported before any layout is tried
    check_kernels_of_layouts(run_, machine_, assume_.system, /*keeps_recipe=*/limits_.recipes.empty());
    run_.provenance.clear();
    machine_.sources.clear();  // every prediction copies the machine
    of_rank_ = machine_.of_rank(run_.threads);
    run_.model.source = {};
    run_.memory.automatic = false;
    for (const PrecisionRecipe recipe : limits_.recipes.empty() ? std::vector{run_.precision.recipe} : limits_.recipes)
      sharding_[recipe] = moebius::sharding_choices(run_, ranks_, recipe, limits_);
    bytes_ = (options.memory_gb > 0 ? options.memory_gb : (1 - kFreeShare) * of_rank_.memory_gb) * 1e9;
    const auto fit = static_cast<double>(run.memory.fit_bytes);
    if (fit > 0) bytes_ = options.memory_gb > 0 ? std::min(bytes_, fit) : fit;
  }

  SearchResult result() {
    bound_all(search_space(run_, ranks_, limits_));
    choose();
    finish();
    return std::move(result_);
  }

 private:
  // A key that the recipe or --set names is a limit that the user gives.
  bool is_named(const char* key) const {
    const auto origin = asked_.provenance.find(key);
    return origin != asked_.provenance.end() && origin->second != "default";
  }

  // For Megatron the recipe's values are kept, since these keys are Moebius' own ways to save memory.
  SearchLimits limits() const {
    const auto domain = static_cast<int64_t>(machine_.of_rank(run_.threads).domain_ranks);
    const bool is_own = assume_.system == PlanSystem::moebius;
    // Long sequences have so many cp layouts that a search of these choices too would take too long.
    const bool is_short = run_.train.seq_len < 2 * kMinCpTokens;
    SearchLimits limits{
        .max_tp = options_.max_tp > 0 ? options_.max_tp : std::min(domain, kMaxTp),
        .max_direct_ranks = machine_.of_rank(run_.threads).ranks_of_windows(),
        .max_two_level_ranks = machine_.of_rank(run_.threads).ranks_of_windows(),
        .domain_ranks = domain,
        .system = assume_.system,
        .load = assume_.load,
        .named = named_layout(asked_),
        .chooses_rows = is_own && !is_named("memory.expert_rows"),
        .chooses_offload = is_own && !is_named("optimizer.offload") && !is_named("optimizer.offload_grad"),
        .chooses_sharding = is_own && is_short && !is_named("parallel.fsdp") && !is_named("parallel.shard_gradients"),
        .chooses_activations =
            is_own && is_short && !is_named("memory.offload") && !is_named("memory.offload_fraction"),
        .chooses_schedule = is_own && is_short && !is_named("parallel.schedule")};
    for (const std::string& name : options_.recipes) limits.recipes.push_back(recipe_of(name));
    return limits;
  }

  void bound_all(std::vector<std::vector<Candidate>> groups);
  std::string refusal(RunSpec& run, const Candidate& c) const;
  double bound_seconds(const Candidate& c, bool updates) const;
  void time_next();
  void sharpen();
  std::vector<size_t> next_round();
  double min_weights(const Candidate& c, const ShardingChoice& sharding) const;
  ShardingChoice needed_sharding(const Candidate& c) const;
  void choose();
  void finish();
  std::string host_text() const;
  std::string named_text() const;
  std::string named_refusal() const;
  std::string reason_of_none() const;

  const std::vector<ShardingChoice>& sharding_choices(PrecisionRecipe recipe) const { return sharding_.at(recipe); }

  // REQUIRES: refusal() is empty, or options.checks are those that were not made.
  Prediction timed(const Candidate& c, PredictOptions options) const {
    options.times = &times_;
    return predict(parts_, run_of(run_, c), ranks_, machine_, assume_, options);
  }

  // Returns the host memory limit of a rank that needs `bytes` of its device. On a CPU both are the same memory.
  double host_limit(double bytes) const {
    return machine_.is_gpu ? machine_.host_memory_of_rank() : std::max(0.0, bytes_ - bytes);
  }

  bool is_too_slow(double step_s) const { return std::ssize(best_) >= options_.keep && step_s >= best_.back().step_s; }
  bool is_pruned(double bound_s) const { return options_.prunes && is_too_slow(bound_s); }

  MemoryLimits memory_limits() const {
    const bool is_full = options_.prunes && std::ssize(best_) >= options_.keep;
    return {.run = run_,
            .limits = limits_,
            .sharding = sharding_,
            .activations = activation_choices(run_, limits_),
            .timed =
                [this](const Candidate& c, PredictOptions o) {
                  o.checks = RunChecks::none;
                  return timed(c, o);
                },
            .buffer = candidate_buffers(parts_, run_, ranks_, machine_, assume_.system,
                                        std::min(bytes_, (1 - kFreeShare) * of_rank_.memory_bytes())),
            .link_bytes_s = machine_.link_gb_s * 1e9,
            .host_limit = [this](double bytes) { return host_limit(bytes); },
            .bytes = bytes_,
            .slowest_s = is_full ? best_.back().step_s : std::numeric_limits<double>::infinity(),
            .prunes = options_.prunes};
  }

  void insert(Candidate c) {
    const auto at = std::upper_bound(best_.begin(), best_.end(), c.step_s,
                                     [](double s, const Candidate& other) { return s < other.step_s; });
    best_.insert(at, std::move(c));
    if (std::ssize(best_) > options_.keep) best_.pop_back();
  }

  PartLibrary& parts_;
  const RunSpec& asked_;
  RunSpec run_;
  int64_t ranks_;
  PlanMachine machine_, of_rank_;
  const Assumptions& assume_;
  const SearchOptions& options_;
  SearchLimits limits_;
  std::map<PrecisionRecipe, std::vector<ShardingChoice>> sharding_;
  double bytes_ = 0, min_bytes_ = 1e300;
  std::vector<Candidate> valid_, best_;  // best_: by time
  std::vector<size_t> group_;            // [valid_]
  // A lower bound of the step time of a layout whose memory is not chosen yet. Equal bounds are ordered by is_sharp,
  // and then by their index.
  struct Bound {
    double step_s = 0;
    bool is_sharp = false;  // true: bound of the whole step; false: of its passes
    size_t index = 0;       // index of the layout in valid_
    auto operator<=>(const Bound&) const = default;
  };
  std::vector<Bound> untimed_;  // bounds by products_seconds(), the lowest last
  std::priority_queue<Bound, std::vector<Bound>, std::greater<>> timed_;
  ThreadPool pool_;
  mutable PartTimes times_;
  SearchResult result_;
  std::string refusal_;  // why the first refused layout is invalid
};

// Returns a lower bound of the fullest rank's memory: weights, gradients and optimizer shard of an average rank, less
// what may be offloaded to the host or sharded over other ranks.
double Search::min_weights(const Candidate& c, const ShardingChoice& sharding) const {
  const ParallelSpec& p = c.parallel;
  const ModelSpec& m = run_.model;
  const OptimizerSpec& o = run_.optimizer;
  if (!run_.train.freeze.empty() || run_.lora.is_on() || run_.num_mtp() != m.num_mtp_layers) return 0;
  const double all = static_cast<double>(m.num_parameters());
  const int64_t moe_layers = m.num_moe_layers() + (m.is_moe_layer(m.num_layers) ? m.num_mtp_layers : 0);
  const double experts = static_cast<double>(moe_layers * m.num_experts) * 3 *
                         static_cast<double>(m.hidden_size * m.moe_intermediate_size);
  const double experts_here = experts / static_cast<double>(p.ep * p.etp);
  const double held = ((all - experts) / static_cast<double>(p.tp) + experts_here) / static_cast<double>(p.pp);
  // A sharded layer is gathered while it runs. A rank has two buffers for this if it has several layers and overlaps,
  // and one more buffer for gradients that arrive.
  // Experts that no other rank holds are not sharded.
  const double layer =
      p.ep * p.etp * p.pp == ranks_ ? 0 : experts_here / static_cast<double>(std::max<int64_t>(1, moe_layers));
  const double buffers = p.overlap && moe_layers >= 2 * p.pp ? 2 : 1, arriving = p.overlap ? 1 : 0;
  const double share = all / static_cast<double>(ranks_);
  const OffloadChoice most = offload_choices(run_, limits_).back();
  const DType compute = run_.precision.compute;
  const double weight = run_.precision.weights == PrecisionChoice::recipe ? 1 : static_cast<double>(size_of(compute));
  const double grad = most.offload_grad ? 0 : o.grad == GradFormat::bf16 ? 2 : 4;
  const double state = most.offload ? 0 : state_bytes(o) + static_cast<double>(master_bytes(o, compute));
  const double held_weights = run_.offload_weights ? 0 : sharding.fsdp ? std::min(held, share + buffers * layer) : held;
  const double held_grads = sharding.shard_gradients ? std::min(held, share + (buffers + arriving) * layer) : held;
  return weight * held_weights + grad * held_grads + state * all / static_cast<double>(ranks_);
}

// Returns the least sharding with which the weights of a layout may fit: the run's own if that suffices.
ShardingChoice Search::needed_sharding(const Candidate& c) const {
  const ShardingChoice own{c.memory.fsdp, c.memory.shard_gradients}, most = sharding_choices(c.recipe).back();
  if (min_weights(c, own) <= bytes_) return own;
  const bool all_weights_fit = min_weights(c, {own.fsdp, most.shard_gradients}) <= bytes_;
  const bool all_gradients_fit = min_weights(c, {most.fsdp, own.shard_gradients}) <= bytes_;
  return {own.fsdp || !all_weights_fit, own.shard_gradients || !all_gradients_fit};
}

// Returns a lower bound of the step time. Recompute, budgets of rows and offload only add time, so the bound is the
// time without them. updates: false leaves out the update of a step, for a lower bound that is computed faster.
double Search::bound_seconds(const Candidate& c, bool updates) const {
  const PredictOptions bounds{.simulate = false,
                              .checks = options_.prunes ? RunChecks::none : RunChecks::all_but_model,
                              .composes = options_.prunes,
                              .memory = PredictOptions::Memory::none};
  if (!options_.prunes) return kRounding * timed(c, bounds).step_s;
  Candidate least = c;
  const ShardingChoice needed = needed_sharding(c);
  least.memory.fsdp = needed.fsdp;
  least.memory.shard_gradients = needed.shard_gradients;
  if (c.memory.offload && !run_.optimizer.offload_buffer) least.memory.buffer = 1e6;  // for all states
  if (updates) return kRounding * timed(least, bounds).step_s;
  return kRounding * passes_seconds(parts_, run_of(run_, least), ranks_, machine_, assume_,
                                    {.checks = RunChecks::none, .times = &times_});
}

// Calls body(). Returns why the checks of a run refused the layout; empty if they accepted it.
template <class Body>
std::string refusal_of(Body&& body) {
  try {
    body();
    return "";
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::usage) throw;
    return e.what();
  }
}

// Returns why the checks of a run refuse the candidate; empty if they accept it. run: a copy of run_; its layout
// becomes that of c.
std::string Search::refusal(RunSpec& run, const Candidate& c) const {
  set_layout(run, run_, c);
  return refusal_of([&] {
    check_layout_of(run, ranks_);
    check_kernels(run, machine_, assume_.system);
    mesh_shape(run.parallel, ranks_).check();
  });
}

// Candidates of a group share their parts, so each thread processes whole groups.
void Search::bound_all(std::vector<std::vector<Candidate>> groups) {
  std::vector<std::vector<Candidate>> legal(groups.size());
  std::vector<double> least(groups.size(), 1e300);
  std::vector<int64_t> too_large(groups.size()), refused(groups.size());
  std::vector<std::string> why(groups.size());  // the first refusal of each group
  pool_.run(std::ssize(groups), [&](int64_t task, int) {
    const auto g = static_cast<size_t>(task);
    RunSpec run = run_;
    for (Candidate& c : groups[g]) {
      const double weights = min_weights(c, sharding_choices(c.recipe).back());
      if (weights > bytes_ && options_.prunes) {
        least[g] = std::min(least[g], weights);
        ++too_large[g];
      } else if (const std::string text = options_.prunes ? refusal(run, c) : ""; text.empty()) {
        if (options_.prunes) c.step_s = kRounding * products_seconds({run_, of_rank_, assume_, ranks_}, c);
        legal[g].push_back(std::move(c));
      } else {
        if (refused[g]++ == 0) why[g] = text;
      }
    }
  });
  for (size_t g = 0; g < groups.size(); ++g) {
    valid_.insert(valid_.end(), std::make_move_iterator(legal[g].begin()), std::make_move_iterator(legal[g].end()));
    group_.resize(valid_.size(), g);
    min_bytes_ = std::min(min_bytes_, least[g]);
    result_.num_too_large += too_large[g];
    result_.num_refused += refused[g];
    if (refusal_.empty()) refusal_ = why[g];
  }
  result_.num_possible = std::ssize(valid_) + result_.num_too_large;
}

// Times the passes of the next layouts. Those of a group are one task, since they share their parts.
void Search::time_next() {
  std::vector<size_t> next;
  for (; !untimed_.empty() && std::ssize(next) < kTimed; untimed_.pop_back()) next.push_back(untimed_.back().index);
  std::sort(next.begin(), next.end());
  std::vector<size_t> begins{0};  // where each group begins in `next`
  for (size_t i = 1; i <= next.size(); ++i)
    if (i == next.size() || group_[next[i]] != group_[next[i - 1]]) begins.push_back(i);
  std::vector<char> is_refused(next.size());
  pool_.run(std::ssize(begins) - 1, [&](int64_t task, int) {
    for (size_t i = begins[static_cast<size_t>(task)]; i < begins[static_cast<size_t>(task) + 1]; ++i) {
      Candidate& c = valid_[next[i]];
      is_refused[i] = !refusal_of([&] { c.step_s = bound_seconds(c, /*updates=*/!options_.prunes); }).empty();
    }
  });
  result_.num_timed += std::ssize(next);
  for (size_t i = 0; i < next.size(); ++i) {
    if (!is_refused[i]) {
      timed_.push({valid_[next[i]].step_s, !options_.prunes, next[i]});
    } else {
      ++result_.num_refused;
      --result_.num_possible;
    }
  }
}

// Replaces the bounds of the next layouts, which are of their passes, by bounds of the whole step.
void Search::sharpen() {
  std::vector<size_t> next;
  for (; !timed_.empty() && !timed_.top().is_sharp && std::ssize(next) < kRound; timed_.pop())
    next.push_back(timed_.top().index);
  pool_.run(std::ssize(next), [&](int64_t i, int) {
    Candidate& c = valid_[next[static_cast<size_t>(i)]];
    c.step_s = bound_seconds(c, /*updates=*/true);
  });
  result_.num_timed += std::ssize(next);
  for (const size_t index : next) timed_.push({valid_[index].step_s, true, index});
}

// Returns the layouts with the lowest bounds of their steps. Only layouts that may be among them are timed.
std::vector<size_t> Search::next_round() {
  std::vector<size_t> round;
  while (std::ssize(round) < kRound && !(timed_.empty() && untimed_.empty())) {
    const bool is_untimed = !untimed_.empty() && (timed_.empty() || untimed_.back().step_s <= timed_.top().step_s);
    if (is_pruned(is_untimed ? untimed_.back().step_s : timed_.top().step_s)) break;
    if (is_untimed) {
      time_next();
    } else if (!timed_.top().is_sharp) {
      sharpen();
    } else {
      round.push_back(timed_.top().index);
      timed_.pop();
    }
  }
  return round;
}

// Chooses the memory of the layouts in rounds, from the lowest bound on. Once a bound is above the time of the worst
// layout that is kept, no later layout can be better.
void Search::choose() {
  for (size_t i = 0; i < valid_.size(); ++i) untimed_.push_back({.step_s = valid_[i].step_s, .index = i});
  std::sort(untimed_.begin(), untimed_.end(), std::greater<>());
  for (std::vector<size_t> round = next_round(); !round.empty(); round = next_round()) {
    const MemoryLimits memory = memory_limits();
    std::vector<FittedMemory> all(round.size());
    pool_.run(std::ssize(round), [&](int64_t i, int) {
      all[static_cast<size_t>(i)] = fit_memory_of(memory, valid_[round[static_cast<size_t>(i)]]);
    });
    for (size_t i = 0; i < round.size(); ++i) {
      if (is_pruned(valid_[round[i]].step_s)) {
        result_.num_slower += std::ssize(round) - static_cast<int64_t>(i);
        break;
      }
      FittedMemory& fitted = all[i];
      result_.num_timed += fitted.num_timed;
      min_bytes_ = std::min(min_bytes_, fitted.min_bytes);
      if (!fitted.candidate)
        ++(fitted.is_slower ? result_.num_slower : result_.num_too_large);
      else if (!is_too_slow(fitted.candidate->step_s))
        insert(*std::move(fitted.candidate));
    }
  }
  result_.num_slower += static_cast<int64_t>(timed_.size() + untimed_.size());
}

// Returns a text about the host memory limit; empty if the search may not offload.
std::string Search::host_text() const {
  if (!machine_.is_gpu || offload_choices(run_, limits_).size() == 1) return "";
  return fmt::format(", and {:.4g} GB of the host's memory for states", machine_.host_memory_of_rank() / 1e9);
}

// Returns a text about the keys that --set names; empty if the search chooses all of them.
std::string Search::named_text() const {
  const std::string keys = limits_.named.text();
  return keys.empty() ? "" : fmt::format("; --set keeps {}: leave some of it out, so that the search chooses it", keys);
}

// Returns why the checks of a run refuse the degrees that --set names if all others and the micro-batch are 1; empty if
// they accept them.
std::string Search::named_refusal() const {
  if (!limits_.named.has_degrees()) return "";
  RunSpec run = run_;
  run.parallel = limits_.named.degrees_alone(run.parallel);
  run.train.micro_batch = 1;
  run.train.global_batch = ranks_;  // a multiple of each dp
  return refusal_of([&] {
    mesh_shape(run.parallel, ranks_).check();
    check_layout_of(run, ranks_);
  });
}

// Returns why the search has no layout, where the named degrees alone are valid.
std::string Search::reason_of_none() const {
  if (!refusal_.empty()) return "the first that was tried is refused: " + refusal_;
  SearchLimits others = limits_;
  others.named.dispatcher = {};
  others.named.schedule = {};
  others.named.cp_comm = {};
  if (!search_space(run_, ranks_, others).empty())
    return "only layouts with other values of the keys that --set names are valid";
  return fmt::format("train.global_batch = {} must be a multiple of micro_batch * dp, and dp = ranks / (tp cp pp)",
                     run_.train.global_batch);
}

void Search::finish() {
  const std::string impossible = result_.num_possible > 0 ? "" : named_refusal();
  MOEBIUS_CHECK(usage, impossible.empty(), "plan: no layout of {} ranks is valid; if all other degrees are 1: {}{}",
                ranks_, impossible, named_text());
  if (result_.num_possible == 0)
    MOEBIUS_FAIL(usage, "plan: no layout of {} ranks is valid for this recipe: {}{}", ranks_, reason_of_none(),
                 named_text());
  MOEBIUS_CHECK(usage, !best_.empty(),
                "plan: none of {} layouts fits in {:.4g} GB per rank; each needs at least {:.4g} GB with {}{}; use "
                "more ranks, or a larger machine{}",
                result_.num_possible, bytes_ / 1e9, min_bytes_ / 1e9,
                limits_.named.recompute ? "memory.recompute as it is named" : "every recompute", host_text(),
                named_text());
  const bool names_device = asked_.device != run_.device;
  for (const Candidate& c : best_) {
    ++result_.num_timed;
    FoundLayout found{.set = keys_of(run_, c)};
    // Choices of memory were fitted without checks.
    if (!refusal_of([&] { found.prediction = timed(c, {.checks = RunChecks::all_but_model}); }).empty()) continue;
    result_.layouts.push_back(std::move(found));
    if (names_device)
      result_.layouts.back().set.push_back(fmt::format("run.device=\"{}\"", machine_.is_gpu ? "cuda" : "cpu"));
  }
  MOEBIUS_CHECK(internal, !result_.layouts.empty(), "plan: the checks of a run refuse each of the best layouts");
  std::stable_sort(result_.layouts.begin(), result_.layouts.end(), [](const FoundLayout& a, const FoundLayout& b) {
    return a.prediction.step_s < b.prediction.step_s;
  });
  for (FoundLayout& layout : result_.layouts)
    layout.why_worse = phase_difference(layout.prediction, result_.layouts[0].prediction);
  result_.memory_bytes = bytes_;
  result_.named = limits_.named.text();
}

}  // namespace

SearchResult search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume, const SearchOptions& options) {
  check_machine(machine, assume);  // a layout that cannot be predicted would count as refused
  return Search(parts, run, ranks, machine, assume, options).result();
}

std::string search_text(const SearchResult& r) {
  std::string text = fmt::format(
      "{} layouts of {} ranks: {} do not fit in {} per rank with any recompute or offload, {} cannot be among the best; "
      "{} more are refused by the checks of a run; {} predictions\n",
      r.num_possible, r.layouts.at(0).prediction.ranks, r.num_too_large, bytes_text(std::llround(r.memory_bytes)),
      r.num_slower, r.num_refused, r.num_timed);
  if (!r.named.empty()) text += fmt::format("kept, as --set says: {}\n", r.named);
  int place = 0;
  for (const FoundLayout& l : r.layouts) {
    const Prediction& p = l.prediction;
    text += fmt::format("{:>2}. {} per step, {} model TFLOP/s per rank, {}  ({})\n", ++place, seconds_text(p.step_s),
                        rate_text(p.model_tflops_per_gpu), bytes_text(p.fullest_rank().total()), l.why_worse);
    for (const std::string& key : l.set) text += " --set '" + key + "'";
    text += "\n";
  }
  return text;
}

}  // namespace moebius
