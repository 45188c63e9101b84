#include "plan/memory/fit_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "config/check/expert_rows_bound.h"
#include "config/check/offload_check.h"
#include "config/recipe/memory_keys.h"
#include "model/gpu_products.h"
#include "plan/cost/usual_machine.h"
#include "plan/search_space.h"

namespace moebius {
namespace {

// Pairs of sets that are tried with exact bytes, the fastest by their estimates.
constexpr size_t kMaxPairs = 24;

// A rank's layer that is recomputed as a whole, with the sets of saved tensors that it has in flight.
struct HeldLayer {
  int64_t layer = 0;
  int64_t num_saved = 1;
};

// The choice for a rank of the pipeline: `rest` for all of its layers but the first `count`, which have `first`.
struct RankChoice {
  RecomputeSpec rest, first;
  int64_t count = 0, bytes = 0;
  double seconds = 0;
};

struct UniformSet {
  RecomputeSpec set;
  int64_t bytes = 0;
  double seconds = 0;
};

// Returns every set of the names that the model has layers for, and the recompute of whole layers.
std::vector<RecomputeSpec> all_sets(const ModelSpec& model) {
  std::vector<RecomputeSpec> sets{{}};
  for (bool RecomputeSpec::*name : recompute_names(model)) {
    for (size_t i = 0, n = sets.size(); i < n; ++i) {
      if (sets[i].covers(name)) continue;
      sets.push_back(sets[i]);
      sets.back().*name = true;
    }
  }
  sets.push_back({.layer = true});
  return sets;
}

class Fitting {
 public:
  Fitting(PartLibrary& library, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
          const Assumptions& assume, bool others_too)
      : run_(run),
        memory_(library, run, ranks, machine, others_too),
        machine_(machine.of_rank(memory_.spec().threads)),
        assume_(assume) {}

  MemoryFit result() {
    const std::optional<MemoryFit> fit = result_below(std::numeric_limits<double>::infinity(), 0);
    MOEBIUS_ASSERT(fit);  // a machine without a link to its host would need infinite time for copies
    return *fit;
  }

  // Returns nothing where the passes of a rank take limit_s or longer. first_rank: the rank that is tried first, since
  // it decides this most often.
  std::optional<MemoryFit> result_below(double limit_s, int64_t first_rank) {
    std::optional<RecomputeSpec> found = run_.memory.recompute;
    if (run_.memory.automatic) found = choose(limit_s, first_rank);
    if (!found) return {};
    const RecomputeSpec& chosen = *found;
    MemoryFit fit{.run = run_, .fit_bytes = run_.memory.fit_bytes};
    fit.run.memory.automatic = false;
    fit.run.memory.recompute = chosen;
    if (run_.memory.automatic) leave_out_recomputed(fit.run.memory);
    for (int64_t r = 0; r < memory_.num_pp_ranks(); ++r) {
      fit.bytes = std::max(fit.bytes, bytes(r, chosen));
      fit.host_bytes = std::max(fit.host_bytes, host_bytes(r, chosen));
      const double s = seconds(r, chosen);
      if (s > fit.pass_s) fit.slowest_rank = r;
      fit.pass_s = std::max(fit.pass_s, s);
    }
    if (fit.pass_s >= limit_s) return {};
    compare_with_kept(fit);
    MOEBIUS_CHECK(usage, fit.bytes <= fit.fit_bytes,
                  "memory.fit = \"{}\": a rank needs {} with memory.recompute = {}; recompute more, or set "
                  "memory.recompute = \"auto\"",
                  exact_bytes_text(fit.fit_bytes), bytes_text(fit.bytes), recompute_list(chosen));
    return fit;
  }

  // Sets what `fit` is compared with: this run with nothing recomputed.
  void compare_with_kept(MemoryFit& fit) const {
    double kept_s = 0;
    fit.kept_bytes = 0;
    for (int64_t r = 0; r < memory_.num_pp_ranks(); ++r) {
      fit.kept_bytes = std::max(fit.kept_bytes, bytes(r, {}));
      kept_s = std::max(kept_s, seconds(r, {}));
    }
    fit.more = fit.pass_s / kept_s - 1;
  }

 private:
  int64_t bytes(int64_t pp_rank, const RecomputeSpec& recompute) const { return memory_.bytes(pp_rank, recompute); }

  // Returns the pinned host memory of a rank, with that of an asynchronous save: at most its weights, masters
  // and moments.
  int64_t host_bytes(int64_t pp_rank, const RecomputeSpec& recompute) const {
    EngineSpec spec = memory_.spec();
    spec.recompute = recompute;
    LayoutParts parts(memory_.library(), spec);
    const RankMemory m = rank_memory(parts, memory_.layout(), memory_.use(pp_rank), pp_rank);
    const int64_t saved =
        run_.checkpoint.async_save ? m.of(Life::param) + m.of(Life::master) + m.of(Life::optimizer) : 0;
    return m.host_bytes() + saved;
  }

  // Returns the time that copies of `bytes` from and to the host add to the two passes of a stage. They overlap with
  // the passes, but read and write the GPU's memory.
  double copies_seconds(double bytes, double forward, double backward, bool splits) const {
    if (bytes == 0) return 0;
    const double copy = bytes / (machine_.link_gb_s * 1e9), back = (splits ? 2 : 1) * copy;
    const double memory = memory_rate({.machine = machine_, .assume = assume_, .spec = memory_.spec()});
    return std::max(0.0, copy - forward) + std::max(0.0, back - backward) + (splits ? 3 : 2) * bytes / memory;
  }

  // Returns the time of the passes of one micro-batch.
  double seconds(int64_t pp_rank, const RecomputeSpec& recompute) const {
    EngineSpec spec = memory_.spec();
    spec.recompute = recompute;
    LayoutParts parts(memory_.library(), spec);
    const TimeContext context{.machine = machine_, .assume = assume_, .spec = spec};
    double forward = 0, backward = 0, sum = 0;
    const auto add = [&](const PartWork& part, bool is_moe, bool is_layer, bool has_backward) {
      const PartTime t = part_time(context, part, is_moe, is_layer);
      forward += t.forward.total();
      backward += t.loss.total() + (has_backward ? t.backward.total() : 0);
    };
    for (int64_t v = 0; v < memory_.layout().num_virtual(); ++v) {
      const StageSpec& stage = memory_.layout().at(pp_rank, v);
      forward = backward = 0;
      double offloaded = 0;
      for (int64_t i = 0; i < stage.num_layers; ++i) offloaded += parts.layer(stage.first_layer + i).offloaded_bytes();
      for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i)
        add(parts.layer(i), spec.model.is_moe_layer(i), true, i >= parts.first_backward());
      add(parts.ends(stage), holds_mtp(stage) && spec.model.is_moe_layer(spec.model.num_layers), false, true);
      const bool splits = memory_.use(pp_rank).splits[static_cast<size_t>(v)];
      sum += forward + backward + copies_seconds(offloaded, forward, backward, splits);
    }
    return sum;
  }

  bool holds_mtp(const StageSpec& stage) const { return stage.num_mtp > 0 && memory_.spec().shape.num_mtp > 0; }

  // Returns the layers, those with the most sets in flight first.
  std::vector<HeldLayer> layers_of(int64_t pp_rank) const {
    std::vector<HeldLayer> layers;
    for (int64_t v = 0; v < memory_.layout().num_virtual(); ++v) {
      const StageSpec& stage = memory_.layout().at(pp_rank, v);
      const int64_t sets = memory_.use(pp_rank).num_saved[static_cast<size_t>(v)];
      for (int64_t i = 0; i < stage.num_layers; ++i) layers.push_back({stage.first_layer + i, sets});
      for (int64_t i = 0; holds_mtp(stage) && i < stage.num_mtp; ++i)
        layers.push_back({memory_.spec().model.num_layers + i, sets});
    }
    std::stable_sort(layers.begin(), layers.end(),
                     [](const HeldLayer& a, const HeldLayer& b) { return a.num_saved > b.num_saved; });
    return layers;
  }

  RecomputeSpec spec_of(const RankChoice& choice, const std::vector<HeldLayer>& layers) const {
    RecomputeSpec spec;
    for (size_t i = 0; i < layers.size(); ++i) add_layer(spec, layers[i].layer, set_of(choice, i));
    return spec;
  }

  static const RecomputeSpec& set_of(const RankChoice& choice, size_t i) {
    return static_cast<int64_t>(i) < choice.count ? choice.first : choice.rest;
  }

  static void add_layer(RecomputeSpec& spec, int64_t layer, const RecomputeSpec& set) {
    for (const auto& [name, field] : kRecomputeNames)
      if (set.*field) spec.ranges.push_back({.what = field, .first = layer, .last = layer});
  }

  // Other ranks may keep what this one recomputes, and then all ranks count the experts' rows.
  std::vector<UniformSet> uniform_sets(int64_t pp_rank, const std::vector<HeldLayer>& layers) const {
    const auto alone = [&](const RecomputeSpec& set) { return spec_of({.rest = set}, layers); };
    std::vector<UniformSet> sets;
    for (const RecomputeSpec& set : all_sets(memory_.spec().model))
      sets.push_back({.set = set, .bytes = bytes(pp_rank, alone(set)), .seconds = seconds(pp_rank, set)});
    std::stable_sort(sets.begin(), sets.end(),
                     [](const UniformSet& a, const UniformSet& b) { return a.seconds < b.seconds; });
    return sets;
  }

  RankChoice choose_rank(int64_t pp_rank, const std::vector<HeldLayer>& layers) const {
    const std::vector<UniformSet> sets = uniform_sets(pp_rank, layers);
    const auto fits = [&](const UniformSet& s) { return s.bytes <= run_.memory.fit_bytes; };
    const UniformSet kept{.bytes = bytes(pp_rank, {}), .seconds = seconds(pp_rank, {})};
    if (fits(kept)) return {.bytes = kept.bytes, .seconds = kept.seconds};
    const auto found = std::find_if(sets.begin(), sets.end(), fits);
    if (found == sets.end()) fail(pp_rank, sets);
    RankChoice best{.rest = found->set, .bytes = found->bytes, .seconds = found->seconds};
    for (const RankChoice& pair : pairs(sets, layers, best.seconds)) {
      if (pair.seconds >= best.seconds) break;
      try_pair(pp_rank, layers, pair, best);
    }
    return best;
  }

  // Estimates the pairs of sets: bytes and time are interpolated linearly in the number of layers.
  std::vector<RankChoice> pairs(const std::vector<UniformSet>& sets, const std::vector<HeldLayer>& layers,
                                double max_seconds) const {
    const double L = static_cast<double>(layers.size());
    std::vector<RankChoice> all;
    for (const UniformSet& a : sets) {
      if (a.seconds >= max_seconds || a.bytes <= run_.memory.fit_bytes) continue;
      for (const UniformSet& b : sets) {
        if (b.bytes > run_.memory.fit_bytes) continue;
        const double share =
            static_cast<double>(a.bytes - run_.memory.fit_bytes) / static_cast<double>(a.bytes - b.bytes);
        RankChoice pair{.rest = a.set, .first = b.set, .count = static_cast<int64_t>(std::ceil(share * L))};
        pair.seconds = a.seconds + (b.seconds - a.seconds) * static_cast<double>(pair.count) / L;
        if (pair.count < std::ssize(layers) && pair.seconds < max_seconds) all.push_back(pair);
      }
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const RankChoice& a, const RankChoice& b) { return a.seconds < b.seconds; });
    if (all.size() > kMaxPairs) all.resize(kMaxPairs);
    return all;
  }

  // Finds the fewest layers with which the pair fits, and keeps it if it is faster than the best.
  void try_pair(int64_t pp_rank, const std::vector<HeldLayer>& layers, RankChoice pair, RankChoice& best) const {
    int64_t too_few = 0, enough = std::ssize(layers);
    while (enough - too_few > 1) {
      pair.count = (too_few + enough) / 2;
      (bytes(pp_rank, spec_of(pair, layers)) <= run_.memory.fit_bytes ? enough : too_few) = pair.count;
    }
    pair.count = enough;
    const RecomputeSpec spec = spec_of(pair, layers);
    pair.seconds = seconds(pp_rank, spec);
    pair.bytes = bytes(pp_rank, spec);
    if (pair.seconds < best.seconds && pair.bytes <= run_.memory.fit_bytes) best = pair;
  }

  [[noreturn]] void fail(int64_t pp_rank, const std::vector<UniformSet>& sets) const {
    const auto least =
        std::min_element(sets.begin(), sets.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
    EngineSpec spec = memory_.spec();
    spec.recompute = least->set;
    LayoutParts parts(memory_.library(), spec);
    const RankMemory m = rank_memory(parts, memory_.layout(), memory_.use(pp_rank), pp_rank);
    const int64_t passes =
        m.of(Life::saved) + m.of(Life::stack) + m.of(Life::rows) + m.of(Life::batch) + m.of(Life::comm);
    MOEBIUS_FAIL(
        usage,
        "memory.fit = \"{}\": pipeline rank {} needs at least {}, with memory.recompute = {}; {} of it are not "
        "of the passes: weights, gradients, the optimizer's state, workspaces; use more ranks, or fewer bytes "
        "for those (optimizer.state, optimizer.master, optimizer.grad, optimizer.offload)",
        exact_bytes_text(run_.memory.fit_bytes), pp_rank, bytes_text(least->bytes), recompute_list(least->set),
        bytes_text(m.total() - passes));
  }

  // A name that all layers have is one of all; the others get ranges of layers.
  RecomputeSpec joined(const std::vector<RecomputeSpec>& of_layer) const {
    RecomputeSpec spec;
    const int64_t n = std::ssize(of_layer);
    for (const auto& [name, field] : kRecomputeNames) {
      std::vector<RecomputeRange> ranges;
      for (int64_t layer = 0; layer < n; ++layer) {
        if (!(of_layer[static_cast<size_t>(layer)].*field)) continue;
        if (!ranges.empty() && ranges.back().last == layer - 1)
          ranges.back().last = layer;
        else
          ranges.push_back({.what = field, .first = layer, .last = layer});
      }
      if (ranges.size() == 1 && ranges[0].first == 0 && ranges[0].last == n - 1)
        spec.*field = true;
      else
        spec.ranges.insert(spec.ranges.end(), ranges.begin(), ranges.end());
    }
    return spec;
  }

  std::optional<RecomputeSpec> choose(double limit_s, int64_t first_rank) const {
    const ModelSpec& model = memory_.spec().model;
    std::vector<RecomputeSpec> of_layer(
        static_cast<size_t>(model.num_layers + (memory_.spec().shape.num_mtp > 0 ? model.num_mtp_layers : 0)));
    for (int64_t i = 0; i < memory_.num_pp_ranks(); ++i) {
      const int64_t r = (first_rank + i) % memory_.num_pp_ranks();
      const std::vector<HeldLayer> layers = layers_of(r);
      const RankChoice choice = choose_rank(r, layers);
      if (choice.seconds >= limit_s) return {};
      for (size_t k = 0; k < layers.size(); ++k) of_layer[static_cast<size_t>(layers[k].layer)] = set_of(choice, k);
    }
    return joined(of_layer);
  }

  const RunSpec& run_;
  RunMemory memory_;
  PlanMachine machine_;
  const Assumptions& assume_;
};

// Chooses memory.offload, and memory.recompute with each list that it tries.
class OffloadSearch {
 public:
  OffloadSearch(PartLibrary& library, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                const Assumptions& assume, bool others_too)
      : library_(library), run_(run), ranks_(ranks), machine_(machine), assume_(assume), others_too_(others_too) {}

  MemoryFit result() {
    std::exception_ptr too_large;
    try {
      best_ = fitted(run_);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::usage) throw;
      too_large = std::current_exception();
    }
    if (best_ && best_->run.memory.recompute == RecomputeSpec{}) return *best_;
    while (add_a_name()) {
    }
    if (!best_) std::rethrow_exception(too_large);
    for (const double fraction : kFractions) try_list(with_fraction(list_, fraction));
    fitting(run_).compare_with_kept(*best_);
    return *best_;
  }

 private:
  static constexpr double kFractions[] = {0.75, 0.5, 0.25};

  static OffloadSpec with_fraction(OffloadSpec list, double fraction) {
    list.fraction = fraction;
    return list;
  }

  Fitting fitting(const RunSpec& run) const { return Fitting(library_, run, ranks_, machine_, assume_, others_too_); }
  MemoryFit fitted(const RunSpec& run) const { return fitting(run).result(); }

  // Tries each name in addition to the list, in all layers and in half of them. Keeps the best, and returns whether
  // there is one.
  bool add_a_name() {
    const OffloadSpec before = list_;
    bool improves = false;
    for (const OffloadSpec& list : longer_lists(before))
      for (const double fraction : {1.0, 0.5}) improves = try_list(with_fraction(list, fraction)) || improves;
    return improves;
  }

  std::vector<OffloadSpec> longer_lists(const OffloadSpec& list) const {
    std::vector<OffloadSpec> lists;
    if (list.tensors.layer) return lists;
    const auto add = [&](bool OffloadSpec::*input, bool RecomputeSpec::*name) {
      OffloadSpec longer = list;
      (input ? longer.*input : longer.tensors.*name) = true;
      if (longer != list) lists.push_back(longer);
    };
    add(&OffloadSpec::layer_input, nullptr);
    for (bool RecomputeSpec::*name : recompute_names(run_.model))
      if (name != &RecomputeSpec::expert_up || !pools_expert_rows(run_)) add(nullptr, name);
    if (!list.any()) add(nullptr, &RecomputeSpec::layer);
    return lists;
  }

  // Keeps the list if it is better than the best one. A list that fits nothing, or needs too much of the host, is not.
  bool try_list(const OffloadSpec& list) {
    if (!list.any()) return false;
    RunSpec run = run_;
    run.memory.offload = list;
    try {
      const double limit_s = best_ ? best_->pass_s : std::numeric_limits<double>::infinity();
      std::optional<MemoryFit> fit = fitting(run).result_below(limit_s, best_ ? best_->slowest_rank : 0);
      if (!fit) return false;
      check_offload(fit->run);
      const double host = machine_.host_memory_of_rank();
      if (host > 0 && static_cast<double>(fit->host_bytes) > host) return false;
      best_ = std::move(fit);
      list_ = list;
      return true;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::usage) throw;
      return false;
    }
  }

  PartLibrary& library_;
  const RunSpec& run_;
  int64_t ranks_ = 1;
  const PlanMachine& machine_;
  const Assumptions& assume_;
  bool others_too_ = false;
  std::optional<MemoryFit> best_;
  OffloadSpec list_;  // that of the best, with the names that its recompute made superfluous
};

bool chooses_offload(const RunSpec& run, const PlanMachine& machine) {
  const auto is_named = [&](const char* key) {
    const auto origin = run.provenance.find(key);
    return origin != run.provenance.end() && origin->second != "default";
  };
  return run.memory.automatic && run.device == DeviceKind::cuda && machine.link_gb_s > 0 && !run.memory.offload.any() &&
         !is_named("memory.offload") && !is_named("memory.offload_fraction");
}

// others_too: ranks may also be on GPUs that are not Hopper's. gpu_bytes: memory of the GPU of a rank, if it is known.
MemoryFit fit_on(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                 const Assumptions& assume, bool others_too, std::optional<int64_t> gpu_bytes) {
  MemoryFit fit = chooses_offload(run, machine) ? OffloadSearch(parts, run, ranks, machine, assume, others_too).result()
                                                : Fitting(parts, run, ranks, machine, assume, others_too).result();
  if (!chooses_buffer(run) || assume.system != PlanSystem::moebius) return fit;
  const int64_t limit = gpu_bytes ? std::min(fit.fit_bytes, without_margin(*gpu_bytes)) : fit.fit_bytes;
  fit.buffer = choose_state_buffer(RunMemory(parts, fit.run, ranks, machine, others_too), limit);
  fit.run.optimizer.offload_buffer = fit.buffer->gib;
  return fit;
}

std::string offload_text(const OffloadSpec& offload) {
  if (!offload.any()) return "";
  const std::string list = fmt::format(", memory.offload = {}", offload_list(offload));
  return offload.fraction == 1 ? list : fmt::format("{}, memory.offload_fraction = {}", list, offload.fraction);
}

}  // namespace

std::string MemoryFit::text() const {
  const std::string buffer_list = buffer ? fmt::format(", optimizer.offload_buffer = {}", buffer->gib) : "";
  const std::string without =
      buffer && buffer->gib > 0 ? fmt::format(", {} without the buffer", bytes_text(bytes)) : "";
  const std::string of_gpu = buffer && buffer->limit_bytes < fit_bytes
                                 ? fmt::format("; the buffer is for {}, {:.0f} % of the memory of the GPU",
                                               bytes_text(buffer->limit_bytes), 100 * (1 - kFreeShare))
                                 : "";
  return fmt::format(
      "memory.recompute = {}{}{}: a rank needs {} of memory.fit = {}{}, and {} with nothing recomputed{}; passes take "
      "{:.1f} % longer{}",
      recompute_list(run.memory.recompute), offload_text(run.memory.offload), buffer_list,
      bytes_text(buffer ? buffer->bytes : bytes), exact_bytes_text(fit_bytes), without, bytes_text(kept_bytes),
      without.empty() ? "" : " and no buffer", 100 * more, of_gpu);
}

void leave_out_recomputed(MemorySpec& memory) {
  for (const auto& [name, field] : kRecomputeNames)
    if (field != &RecomputeSpec::layer && memory.recompute.covers(field)) memory.offload.tensors.*field = false;
  if (!memory.offload.any()) memory.offload = {};
}

MemoryFit fit_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                     const Assumptions& assume) {
  MOEBIUS_ASSERT(run.memory.fit_bytes > 0);
  return fit_on(parts, run, ranks, machine, assume, /*others_too=*/false, static_cast<int64_t>(machine.memory_bytes()));
}

MemoryFit fit_memory(const RunSpec& run, int64_t ranks, const FitMachines& machines) {
  check_quantised_products(run.model, run.precision, run.lora, run.device);
  PartLibrary parts;
  const Assumptions assume;
  const GpuKinds& gpus = machines.gpus;
  const PlanMachine machine = usual_machine_of(run.device, machines);
  MOEBIUS_ASSERT(run.memory.fit_bytes > 0);
  return fit_on(parts, run, ranks, machine, assume, machine.is_gpu && gpus.hopper && gpus.others, machines.gpu_bytes);
}

}  // namespace moebius
