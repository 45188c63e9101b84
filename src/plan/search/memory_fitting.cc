#include "plan/search/memory_fitting.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

#include "plan/memory/state_buffer.h"

namespace moebius {
namespace {

// The maximum number of memory choices to try for a layout, besides the one that needs the least memory.
constexpr int kMaxChoices = 6;
// A choice is tried if its estimates exceed the memory limit, or the time of the layouts kept, by at most this factor.
constexpr double kEstimateError = 1.02;

// Finds the memory choice of one candidate: the tensors that its ranks keep, and where.
class MemoryFitting {
 public:
  MemoryFitting(const MemoryLimits& search, const Candidate& c) : search_(search), c_(c) {}
  // Returns the candidate with the choice that fits and costs the least time.
  FittedMemory result() {
    if (const auto choice = found()) {
      fitted_.candidate = c_;
      fitted_.candidate->memory = *choice;
      fitted_.candidate->step_s = step_s_;
    }
    return std::move(fitted_);
  }

 private:
  // Memory::fullest_stages predicts at most this many pipeline ranks.
  static constexpr size_t kMaxPredicted = 3;
  // A figure of each of these ranks, in bytes.
  using RankBytes = std::array<double, kMaxPredicted>;
  // The estimated time and memory of a choice.
  struct Estimate {
    MemoryChoice choice;
    double step_s = 0;
    double states_link_s = 0;  // the part of it in which states on the host move
    RankBytes device{}, host{};
    RankBytes freed{}, freed_host{};  // the part of them that recompute and budgets of rows may free
    double bytes() const { return *std::max_element(device.begin(), device.end()); }
    double host_bytes() const { return *std::max_element(host.begin(), host.end()); }
  };
  std::optional<MemoryChoice> found();
  void find_useful_shardings();
  // Returns the choices that may need the least memory, for each budget of rows.
  std::vector<MemoryChoice> min_choices() const;
  bool may_be_fast();
  bool least_may_fit();
  std::vector<Estimate> choices_that_may_fit();
  std::vector<Estimate> estimates_of_recompute();
  std::vector<Estimate> with_other_budgets(const std::vector<Estimate>& all);
  std::vector<Estimate> with_other_places(const std::vector<Estimate>& all, const Estimate& plain);
  std::vector<Estimate> with_other_sharding(const std::vector<Estimate>& all, const Estimate& plain);
  std::vector<Estimate> with_activations_on_the_host();
  const std::vector<ShardingChoice>& shardings() const { return search_.sharding.at(c_.recipe); }
  // zb_h1 needs whole weights and gradients (check_zb_h1()).
  bool may_shard() const { return shardings().size() > 1 && c_.parallel.schedule != PipelineSchedule::zb_h1; }
  // Only inputs of layers that are recomputed as a whole are moved to the host.
  bool may_have_inputs_on_host() const {
    const RecomputeSpec& recompute = c_.memory.recompute;
    return !search_.limits.named.recompute || recompute.layer ||
           std::any_of(recompute.ranges.begin(), recompute.ranges.end(),
                       [](const RecomputeRange& range) { return range.what == &RecomputeSpec::layer; });
  }
  Estimate estimate(const MemoryChoice& choice);
  static Estimate sum(Estimate e, const Estimate& with, const Estimate& without);
  // Returns the estimated time with the buffer of states that has room beside the choice.
  double seconds(const Estimate& e) const {
    if (!e.choice.offload || !search_.buffer) return e.step_s;
    const double room = std::max(0.0, kEstimateError * search_.bytes - e.bytes());
    return e.step_s - std::min(e.states_link_s, room / search_.link_bytes_s);
  }
  bool may_fit(const Estimate& e) const {
    return e.bytes() <= kEstimateError * search_.bytes &&
           e.host_bytes() <= kEstimateError * search_.host_limit(e.bytes() / kEstimateError);
  }

  // Returns the prediction with this choice, with the memory of only those ranks that may be the fullest.
  const Prediction& timed(const MemoryChoice& choice) {
    const auto known =
        std::find_if(predicted_.begin(), predicted_.end(), [&](const auto& p) { return p.first == choice; });
    if (known != predicted_.end()) return known->second;
    return predicted_.emplace_back(choice, predicted(choice, PredictOptions::Memory::fullest_stages)).second;
  }
  Prediction predicted(const MemoryChoice& choice, PredictOptions::Memory memory) {
    ++fitted_.num_timed;
    return search_.timed(with(choice), {.simulate = false, .memory = memory});
  }
  Candidate with(const MemoryChoice& choice) const {
    Candidate c = c_;
    c.memory = choice;
    return c;
  }
  bool fits(const Prediction& p) {
    const auto bytes = static_cast<double>(p.fullest_rank().total());
    if (bytes > search_.bytes) fitted_.min_bytes = std::min(fitted_.min_bytes, bytes);
    return bytes <= search_.bytes && p.host_bytes <= search_.host_limit(bytes);
  }
  // Returns the choice with its buffer of states, or nothing if it does not fit.
  std::optional<MemoryChoice> tried(const MemoryChoice& choice) {
    const Prediction& p = timed(choice);
    if (!fits(p)) return {};
    const bool has_all = std::ssize(p.memory) == p.num_pp_ranks;
    if (!has_all && !fits(predicted(choice, PredictOptions::Memory::all))) return {};
    MemoryChoice found = choice;
    if (choice.offload && search_.buffer) found.buffer = search_.buffer(with(choice));
    step_s_ = timed(found).step_s;
    return found;
  }

  const MemoryLimits& search_;
  const Candidate& c_;
  double step_s_ = 0;
  std::deque<std::pair<MemoryChoice, Prediction>> predicted_;
  std::vector<Estimate> sharded_;  // with nothing recomputed: each sharding that is not too slow by itself
  FittedMemory fitted_;
};

void MemoryFitting::find_useful_shardings() {
  if (!may_shard()) return;
  for (const ShardingChoice& sharding : shardings()) {
    MemoryChoice choice = c_.memory;
    choice.fsdp = sharding.fsdp;
    choice.shard_gradients = sharding.shard_gradients;
    if (choice == c_.memory) continue;
    Estimate e = estimate(choice);
    if (!search_.prunes || e.step_s < search_.slowest_s) sharded_.push_back(std::move(e));
  }
}

// Returns the choice; nothing if none fits or all that fit are too slow. The candidate begins with the fastest choice.
std::optional<MemoryChoice> MemoryFitting::found() {
  const Prediction& plain = timed(c_.memory);
  if (const auto choice = tried(c_.memory)) return choice;
  // No choice frees more than this memory of the fullest rank.
  const OffloadChoice most = offload_choices(search_.run, search_.limits).back();
  const RankMemory& rank = plain.fullest_rank();
  int64_t freed = rank.of(Life::saved) + rank.of(Life::stack) + rank.of(Life::rows);
  if (most.offload) freed += rank.of(Life::master) + rank.of(Life::optimizer);
  if (most.offload_grad) freed += rank.of(Life::grad);
  const auto kept = static_cast<double>(rank.total() - freed);
  find_useful_shardings();
  const double in_shares = may_shard() ? static_cast<double>(rank.of(Life::param) + rank.of(Life::grad)) : 0;
  if (kept - in_shares > search_.bytes) {
    fitted_.min_bytes = std::min(fitted_.min_bytes, kept - in_shares);
    return std::nullopt;
  }
  fitted_.is_slower = kept > search_.bytes && may_shard() && sharded_.empty();
  if (fitted_.is_slower) return std::nullopt;
  fitted_.is_slower = search_.prunes && !may_be_fast();
  if (fitted_.is_slower) return std::nullopt;
  if (search_.prunes && !least_may_fit()) return std::nullopt;
  for (const Estimate& e : choices_that_may_fit()) {
    fitted_.is_slower = seconds(e) / kEstimateError >= search_.slowest_s;
    if (fitted_.is_slower) return std::nullopt;
    if (const auto choice = tried(e.choice)) return choice;
  }
  for (const MemoryChoice& least : min_choices())
    if (const auto choice = tried(least)) return choice;
  return std::nullopt;
}

// Recomputing whole layers needs the least memory, perhaps with sharded layers or with their inputs on the host.
// In a stage of few layers the buffers of sharding or offload may need more than they save.
std::vector<MemoryChoice> MemoryFitting::min_choices() const {
  const OffloadChoice most = offload_choices(search_.run, search_.limits).back();
  std::vector<MemoryChoice> choices;
  for (const std::optional<double>& rows : row_budgets(search_.run, c_.parallel, search_.limits)) {
    MemoryChoice least = c_.memory;
    if (!search_.limits.named.recompute) least.recompute = {.layer = true};
    least.expert_rows = rows;
    least.offload = most.offload;
    least.offload_grad = most.offload_grad;
    choices.push_back(least);
    if (sharded_.empty()) continue;
    least.fsdp = sharded_.back().choice.fsdp;
    least.shard_gradients = sharded_.back().choice.shard_gradients;
    choices.push_back(least);
  }
  const bool has_more = search_.activations.size() > 1 && may_have_inputs_on_host();
  for (size_t i = 0, n = choices.size(); i < n && has_more; ++i) {
    choices.push_back(choices[i]);
    choices.back().activations = {.layer_input = true};
  }
  return choices;
}

// Returns false if every offload of states and every sharding that may fit is too slow, even if recompute and budgets
// of rows took no time and freed all saved tensors on each rank. So few estimates rule out most layouts.
bool MemoryFitting::may_be_fast() {
  const Estimate first = estimate(c_.memory);
  std::vector<Estimate> all{first};
  for (const Estimate& e : with_other_places(all, first)) all.push_back(e);
  for (const Estimate& e : with_other_sharding(all, first)) all.push_back(e);
  std::erase_if(all, [&](Estimate e) {
    for (size_t r = 0; r < kMaxPredicted; ++r) {
      e.device[r] -= e.freed[r];
      e.host[r] -= e.freed_host[r];
    }
    return !may_fit(e);
  });
  const auto is_fast = [&](const Estimate& e) { return seconds(e) / kEstimateError < search_.slowest_s; };
  return all.empty() || std::any_of(all.begin(), all.end(), is_fast);
}

// Returns whether the choices with the least memory may fit; if not, no others are estimated. The inputs of layers,
// when offloaded, free at most Life::saved.
bool MemoryFitting::least_may_fit() {
  double bytes = 1e300, without_saved = 1e300;
  for (const MemoryChoice& least : min_choices()) {
    if (least.activations != c_.memory.activations && without_saved > search_.bytes) break;
    const RankMemory& rank = timed(least).fullest_rank();
    bytes = std::min(bytes, static_cast<double>(rank.total()));
    without_saved = std::min(without_saved, static_cast<double>(rank.total() - rank.of(Life::saved)));
    if (bytes <= kEstimateError * search_.bytes) return true;
  }
  fitted_.min_bytes = std::min(fitted_.min_bytes, bytes);
  return false;
}

MemoryFitting::Estimate MemoryFitting::estimate(const MemoryChoice& choice) {
  const Prediction& p = timed(choice);
  Estimate e{.choice = choice, .step_s = p.step_s, .states_link_s = p.states_link_s};
  for (size_t r = 0; r < p.memory.size(); ++r) {
    const RankMemory& m = p.memory[r];
    e.device.at(r) = static_cast<double>(m.total());
    e.host.at(r) = static_cast<double>(m.host_bytes());
    e.freed.at(r) = static_cast<double>(m.of(Life::saved) + m.of(Life::stack) + m.of(Life::rows));
    e.freed_host.at(r) = static_cast<double>(m.spill_bytes);
  }
  return e;
}

// Returns `e` with the effect of a choice, rank by rank: the fullest rank need not be the same one with each choice.
MemoryFitting::Estimate MemoryFitting::sum(Estimate e, const Estimate& with, const Estimate& without) {
  e.step_s += with.step_s - without.step_s;
  e.states_link_s += with.states_link_s - without.states_link_s;
  for (RankBytes Estimate::*bytes : {&Estimate::device, &Estimate::host, &Estimate::freed, &Estimate::freed_host})
    for (size_t r = 0; r < kMaxPredicted; ++r) (e.*bytes)[r] += (with.*bytes)[r] - (without.*bytes)[r];
  return e;
}

// Returns an estimate for every set of names of memory.recompute: the sum of the effects of its names.
std::vector<MemoryFitting::Estimate> MemoryFitting::estimates_of_recompute() {
  const Estimate plain = estimate(c_.memory);
  std::vector<Estimate> all{plain};
  if (search_.limits.named.recompute) return all;
  for (bool RecomputeSpec::*name : recompute_names(search_.run.model)) {
    MemoryChoice alone = c_.memory;
    alone.recompute.*name = true;
    const Estimate with_name = estimate(alone);
    for (size_t i = 0, n = all.size(); i < n; ++i) {
      all.push_back(sum(all[i], with_name, plain));
      all.back().choice.recompute.*name = true;
    }
  }
  return all;
}

// Returns `all` with each other budget of rows. Its effect depends on no recompute except of the rows (expert_up).
std::vector<MemoryFitting::Estimate> MemoryFitting::with_other_budgets(const std::vector<Estimate>& all) {
  std::vector<Estimate> more;
  for (const std::optional<double>& rows : row_budgets(search_.run, c_.parallel, search_.limits)) {
    if (rows == c_.memory.expert_rows) continue;
    for (const bool keeps : {true, false}) {
      if (search_.limits.named.recompute && keeps == c_.memory.recompute.expert_up) continue;
      MemoryChoice choice = c_.memory;
      choice.recompute.expert_up = !keeps;
      const Estimate own = estimate(choice);
      choice.expert_rows = rows;
      const Estimate other = estimate(choice);
      for (const Estimate& e : all) {
        if (e.choice.recompute.expert_up == keeps) continue;
        more.push_back(sum(e, other, own));
        more.back().choice.expert_rows = rows;
      }
    }
  }
  return more;
}

// Returns `all` with each other place of optimizer states, whose effect does not depend on recompute.
std::vector<MemoryFitting::Estimate> MemoryFitting::with_other_places(const std::vector<Estimate>& all,
                                                                      const Estimate& plain) {
  std::vector<Estimate> more;
  for (const OffloadChoice& place : offload_choices(search_.run, search_.limits)) {
    if (place.offload == c_.memory.offload && place.offload_grad == c_.memory.offload_grad) continue;
    MemoryChoice choice = c_.memory;
    choice.offload = place.offload;
    choice.offload_grad = place.offload_grad;
    const Estimate other = estimate(choice);
    for (const Estimate& e : all) {
      more.push_back(sum(e, other, plain));
      more.back().choice.offload = choice.offload;
      more.back().choice.offload_grad = choice.offload_grad;
    }
  }
  return more;
}

// Returns `all` with each other sharding, whose effect does not depend on recompute or on the place of states.
std::vector<MemoryFitting::Estimate> MemoryFitting::with_other_sharding(const std::vector<Estimate>& all,
                                                                        const Estimate& plain) {
  std::vector<Estimate> more;
  for (const Estimate& other : sharded_) {
    for (const Estimate& e : all) {
      more.push_back(sum(e, other, plain));
      more.back().choice.fsdp = other.choice.fsdp;
      more.back().choice.shard_gradients = other.choice.shard_gradients;
    }
  }
  return more;
}

// Returns the choices with offload: inputs of layers that are recomputed as a whole, or all activations.
std::vector<MemoryFitting::Estimate> MemoryFitting::with_activations_on_the_host() {
  std::vector<Estimate> more;
  for (size_t i = 1; i < search_.activations.size(); ++i) {
    MemoryChoice choice = c_.memory;
    choice.activations = search_.activations[i];
    if (!may_have_inputs_on_host() && choice.activations.layer_input) continue;
    if (!search_.limits.named.recompute) choice.recompute.layer = choice.activations.layer_input;
    more.push_back(estimate(choice));
  }
  return more;
}

// Returns the fastest choices whose estimates fit, and after them the one whose estimate needs the least memory.
std::vector<MemoryFitting::Estimate> MemoryFitting::choices_that_may_fit() {
  std::vector<Estimate> all = estimates_of_recompute();
  const Estimate plain = all[0];
  for (const Estimate& e : with_other_budgets(all)) all.push_back(e);
  for (const Estimate& e : with_other_places(all, plain)) all.push_back(e);
  for (const Estimate& e : with_other_sharding(all, plain)) all.push_back(e);
  for (const Estimate& e : with_activations_on_the_host()) all.push_back(e);
  std::erase_if(all, [&](const Estimate& e) { return !may_fit(e) || e.choice == c_.memory; });
  if (all.empty()) return {};
  std::stable_sort(all.begin(), all.end(),
                   [&](const Estimate& a, const Estimate& b) { return seconds(a) < seconds(b); });
  const Estimate least = *std::min_element(all.begin(), all.end(),
                                           [](const Estimate& a, const Estimate& b) { return a.bytes() < b.bytes(); });
  if (std::ssize(all) > kMaxChoices) all.resize(kMaxChoices);
  all.push_back(least);
  return all;
}

}  // namespace

std::function<double(const Candidate&)> candidate_buffers(PartLibrary& parts, const RunSpec& run, int64_t ranks,
                                                          const PlanMachine& machine, PlanSystem system,
                                                          double limit_bytes) {
  if (run.device != DeviceKind::cuda || run.optimizer.offload_buffer || system != PlanSystem::moebius) return {};
  return [&, ranks, limit_bytes](const Candidate& c) {
    const RunMemory memory(parts, run_of(run, c), ranks, machine, /*others_too=*/false, RunChecks::none);
    return choose_state_buffer(memory, static_cast<int64_t>(limit_bytes)).gib;
  };
}

FittedMemory fit_memory_of(const MemoryLimits& search, const Candidate& candidate) {
  return MemoryFitting(search, candidate).result();
}

}  // namespace moebius
