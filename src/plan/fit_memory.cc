#include "plan/fit_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/recipe/memory_keys.h"
#include "model/gpu_products.h"
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

RunSpec without_choice(RunSpec run) {
  run.memory.automatic = false;
  run.memory.fit_bytes = 0;
  return run;
}

class Fitting {
 public:
  Fitting(PartLibrary& library, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
          const Assumptions& assume, bool others_too)
      : library_(library),
        run_(run),
        specs_(specs_of(without_choice(run), ranks, machine, others_too)),
        layout_(stages_of(specs_[0])),
        machine_(machine.of_rank(specs_[0].threads)),
        assume_(assume) {
    for (int64_t r = 0; r < layout_.num_ranks; ++r)
      uses_.push_back(pipeline_use(specs_[0].pipeline, specs_[0].mesh.pp, r));
  }

  MemoryFit result() {
    const RecomputeSpec chosen = run_.memory.automatic ? choose() : run_.memory.recompute;
    MemoryFit fit{.run = run_, .fit_bytes = run_.memory.fit_bytes};
    fit.run.memory.automatic = false;
    fit.run.memory.recompute = chosen;
    if (run_.memory.automatic) leave_out_recomputed(fit.run.memory);
    double kept_s = 0, s = 0;
    for (int64_t r = 0; r < layout_.num_ranks; ++r) {
      fit.bytes = std::max(fit.bytes, bytes(r, chosen));
      fit.kept_bytes = std::max(fit.kept_bytes, bytes(r, {}));
      s = std::max(s, seconds(r, chosen));
      kept_s = std::max(kept_s, seconds(r, {}));
    }
    fit.more = s / kept_s - 1;
    MOEBIUS_CHECK(usage, fit.bytes <= fit.fit_bytes,
                  "memory.fit = \"{}\": a rank needs {} with memory.recompute = {}; recompute more, or set "
                  "memory.recompute = \"auto\"",
                  exact_bytes_text(fit.fit_bytes), bytes_text(fit.bytes), recompute_list(chosen));
    return fit;
  }

 private:
  static std::vector<EngineSpec> specs_of(const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                                          bool others_too) {
    std::vector<EngineSpec> specs = specs_of_dispatchers(run, ranks, machine);
    const size_t n = others_too ? specs.size() : 0;
    for (size_t i = 0; i < n; ++i) specs.push_back(on_other_gpu(specs[i]));
    return specs;
  }

  // Ranks that share experts may find at the start that they can access each other's memory.
  static std::vector<EngineSpec> specs_of_dispatchers(RunSpec run, int64_t ranks, const PlanMachine& machine) {
    std::vector<EngineSpec> specs{planned_engine_spec_on(run, ranks, machine)};
    if (run.parallel.dispatcher != DispatcherKind::automatic || run.parallel.ep * run.parallel.etp == 1) return specs;
    for (const DispatcherKind kind : {DispatcherKind::direct, DispatcherKind::two_level}) {
      if (kind == DispatcherKind::two_level && run.device == DeviceKind::cuda) continue;  // only where it is named
      run.parallel.dispatcher = kind;
      try {
        specs.push_back(planned_engine_spec_on(run, ranks, machine));
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::usage) throw;  // this layout is refused, so no run uses it
      }
    }
    return specs;
  }

  int64_t bytes(int64_t pp_rank, const RecomputeSpec& recompute) const {
    int64_t most = 0;
    for (EngineSpec spec : specs_) {
      spec.recompute = recompute;
      LayoutParts parts(library_, spec);
      most = std::max(most, rank_memory(parts, layout_, uses_[static_cast<size_t>(pp_rank)], pp_rank).total());
    }
    return most;
  }

  // Returns the time of the passes of one micro-batch.
  double seconds(int64_t pp_rank, const RecomputeSpec& recompute) const {
    EngineSpec spec = specs_[0];
    spec.recompute = recompute;
    LayoutParts parts(library_, spec);
    const TimeContext context{.machine = machine_, .assume = assume_, .spec = spec};
    double sum = 0;
    const auto add = [&](const PartWork& part, bool is_moe, bool is_layer, bool has_backward) {
      const PartTime t = part_time(context, part, is_moe, is_layer);
      sum += t.forward.total() + t.loss.total() + (has_backward ? t.backward.total() : 0);
    };
    for (int64_t v = 0; v < layout_.num_virtual(); ++v) {
      const StageSpec& stage = layout_.at(pp_rank, v);
      for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i)
        add(parts.layer(i), spec.model.is_moe_layer(i), true, i >= parts.first_backward());
      add(parts.ends(stage), holds_mtp(stage) && spec.model.is_moe_layer(spec.model.num_layers), false, true);
    }
    return sum;
  }

  bool holds_mtp(const StageSpec& stage) const { return stage.num_mtp > 0 && specs_[0].shape.num_mtp > 0; }

  // Returns the layers, those with the most sets in flight first.
  std::vector<HeldLayer> layers_of(int64_t pp_rank) const {
    std::vector<HeldLayer> layers;
    for (int64_t v = 0; v < layout_.num_virtual(); ++v) {
      const StageSpec& stage = layout_.at(pp_rank, v);
      const int64_t sets = uses_[static_cast<size_t>(pp_rank)].num_saved[static_cast<size_t>(v)];
      for (int64_t i = 0; i < stage.num_layers; ++i) layers.push_back({stage.first_layer + i, sets});
      for (int64_t i = 0; holds_mtp(stage) && i < stage.num_mtp; ++i)
        layers.push_back({specs_[0].model.num_layers + i, sets});
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
    for (const RecomputeSpec& set : all_sets(specs_[0].model))
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
    EngineSpec spec = specs_[0];
    spec.recompute = least->set;
    LayoutParts parts(library_, spec);
    const RankMemory m = rank_memory(parts, layout_, uses_[static_cast<size_t>(pp_rank)], pp_rank);
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

  RecomputeSpec choose() const {
    const ModelSpec& model = specs_[0].model;
    std::vector<RecomputeSpec> of_layer(
        static_cast<size_t>(model.num_layers + (specs_[0].shape.num_mtp > 0 ? model.num_mtp_layers : 0)));
    for (int64_t r = 0; r < layout_.num_ranks; ++r) {
      const std::vector<HeldLayer> layers = layers_of(r);
      const RankChoice choice = choose_rank(r, layers);
      for (size_t i = 0; i < layers.size(); ++i) of_layer[static_cast<size_t>(layers[i].layer)] = set_of(choice, i);
    }
    return joined(of_layer);
  }

  PartLibrary& library_;
  const RunSpec& run_;
  std::vector<EngineSpec> specs_;  // one for each dispatcher that a run may choose, and each kind of GPU
  StageLayout layout_;
  PlanMachine machine_;
  const Assumptions& assume_;
  std::vector<PipelineUse> uses_;  // [pp_rank]
};

// Returns the rates that are used if no machine is named: the data sheet of an H100, or a server's CPU.
PlanMachine usual_machine(bool is_gpu) {
  PlanMachine m{.name = is_gpu ? "a GPU" : "a CPU", .is_gpu = is_gpu};
  m.bf16_tflops = is_gpu ? 989 : 1;
  m.fp8_tflops = is_gpu ? 1979 : 0;
  m.memory_gb = 80;
  m.memory_tb_s = is_gpu ? 3.35 : 0.1;
  m.threads = is_gpu ? 0 : 16;
  m.kernel_us = is_gpu ? 3 : 1;
  m.domain_ranks = 8;
  m.inside_gb_s = is_gpu ? 450 : 20;
  m.across_gb_s = is_gpu ? 50 : 10;
  m.inside_us = 22;
  m.across_us = 40;
  Shares& shares = m.of(PlanSystem::moebius);
  shares.fill(0.6);
  shares[static_cast<size_t>(Share::attention_backward)] = 0.4;
  shares[static_cast<size_t>(Share::memory)] = 0.8;
  m.has_shares[static_cast<size_t>(PlanSystem::moebius)] = true;
  return m;
}

}  // namespace

std::string MemoryFit::text() const {
  return fmt::format(
      "memory.recompute = {}: a rank needs {} of memory.fit = {}, and {} with nothing recomputed; passes take {:+.1f} % "
      "of time for it",
      recompute_list(run.memory.recompute), bytes_text(bytes), exact_bytes_text(fit_bytes), bytes_text(kept_bytes),
      100 * more);
}

void leave_out_recomputed(MemorySpec& memory) {
  for (const auto& [name, field] : kRecomputeNames)
    if (field != &RecomputeSpec::layer && memory.recompute.covers(field)) memory.offload.tensors.*field = false;
}

MemoryFit fit_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                     const Assumptions& assume) {
  MOEBIUS_ASSERT(run.memory.fit_bytes > 0);
  return Fitting(parts, run, ranks, machine, assume, /*others_too=*/false).result();
}

MemoryFit fit_memory(const RunSpec& run, int64_t ranks, const GpuKinds& gpus) {
  check_quantised_products(run.model, run.precision, run.lora, run.device);
  PartLibrary parts;
  const Assumptions assume;
  PlanMachine machine = usual_machine(run.device == DeviceKind::cuda);
  if (machine.is_gpu) machine.capability = gpus.hopper ? 90 : 80;
  MOEBIUS_ASSERT(run.memory.fit_bytes > 0);
  return Fitting(parts, run, ranks, machine, assume, machine.is_gpu && gpus.hopper && gpus.others).result();
}

}  // namespace moebius
