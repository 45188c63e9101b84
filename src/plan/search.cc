#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/thread_pool.h"
#include "plan/print.h"

namespace moebius {
namespace {

// Sets of recompute that are tried for a layout, beside the whole of it.
constexpr int kMostSets = 6;
// A domain of fast links with more ranks is of several hosts, and the direct dispatcher reaches those of one.
constexpr int64_t kMostOfHost = 8;
// A set whose estimate is at most so much above the memory is tried.
constexpr double kEstimateError = 1.02;

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
        run_(run_on(run, machine)),
        ranks_(ranks),
        machine_(machine),
        assume_(assume),
        options_(options) {
    run_.provenance.clear();
    run_.model.source = {};
    run_.memory.automatic = false;
    const double of_rank = machine.of_rank(run_.threads).memory_gb;
    bytes_ = (options.memory_gb > 0 ? options.memory_gb : 0.95 * of_rank) * 1e9;
    if (options.memory_gb == 0 && run.memory.fit_bytes > 0) bytes_ = static_cast<double>(run.memory.fit_bytes);
  }

  SearchResult result() {
    SearchLimits limits{.system = assume_.system};
    const auto domain = static_cast<int64_t>(machine_.of_rank(run_.threads).domain_ranks);
    limits.most_tp = options_.most_tp > 0 ? options_.most_tp : std::min<int64_t>(domain, kMostOfHost);
    limits.most_direct = domain <= kMostOfHost ? domain : 1;
    for (const std::string& name : options_.recipes) limits.recipes.push_back(recipe_of(name));
    time_all(search_space(run_, ranks_, limits));
    choose();
    finish();
    return std::move(result_);
  }

 private:
  void time_all(std::vector<std::vector<Candidate>> groups);
  bool bound(PartLibrary& parts, Candidate& c) const;
  double least_weights(const ParallelSpec& p) const;
  void choose();
  bool fit_in_memory(Candidate c);
  std::vector<RecomputeSpec> sets_that_may_fit(const Candidate& c, const Prediction& plain);
  bool fits(const Prediction& p);
  void finish();

  Prediction timed(const Candidate& c, const PredictOptions& options) {
    ++result_.num_timed;
    return predict(parts_, run_of(run_, c), ranks_, machine_, assume_, options);
  }
  Prediction timed(Candidate c, const RecomputeSpec& recompute, PredictOptions::Memory memory) {
    c.recompute = recompute;
    return timed(c, {.simulate = false, .memory = memory});
  }

  bool is_too_slow(double step_s) const { return std::ssize(best_) >= options_.keep && step_s >= best_.back().step_s; }

  void insert(Candidate c, const RecomputeSpec& recompute, double step_s) {
    c.recompute = recompute;
    c.step_s = step_s;
    const auto at = std::upper_bound(best_.begin(), best_.end(), step_s,
                                     [](double s, const Candidate& other) { return s < other.step_s; });
    best_.insert(at, std::move(c));
    if (std::ssize(best_) > options_.keep) best_.pop_back();
  }

  PartLibrary& parts_;
  const RunSpec& asked_;
  RunSpec run_;
  int64_t ranks_;
  const PlanMachine& machine_;
  const Assumptions& assume_;
  const SearchOptions& options_;
  double bytes_ = 0, least_bytes_ = 1e300;
  std::vector<Candidate> legal_, best_;  // best_: by time
  SearchResult result_;
};

// Bytes that the fullest rank has at least: weights, gradients and the optimizer's share of an average rank.
double Search::least_weights(const ParallelSpec& p) const {
  const ModelSpec& m = run_.model;
  if (!run_.train.freeze.empty() || run_.lora.is_on() || run_.num_mtp() != m.num_mtp_layers) return 0;
  const double all = static_cast<double>(m.num_parameters());
  const int64_t moe_layers = m.num_moe_layers() + (m.is_moe_layer(m.num_layers) ? m.num_mtp_layers : 0);
  const double experts = static_cast<double>(moe_layers * m.num_experts) * 3 *
                         static_cast<double>(m.hidden_size * m.moe_intermediate_size);
  const double held = ((all - experts) / static_cast<double>(p.tp) + experts / static_cast<double>(p.ep * p.etp)) /
                      static_cast<double>(p.pp);
  const double compute = static_cast<double>(size_of(run_.precision.compute));
  return (compute + 4) * held + (compute < 4 ? 12 : 8) * all / static_cast<double>(ranks_);
}

// Recompute only adds time, so its absence bounds the time from below. False: the run's checks refuse the layout.
bool Search::bound(PartLibrary& parts, Candidate& c) const {
  try {
    const PredictOptions options{.simulate = false, .memory = PredictOptions::Memory::none};
    c.step_s = predict(parts, run_of(run_, c), ranks_, machine_, assume_, options).step_s;
    return true;
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::usage) throw;
    return false;
  }
}

// Candidates of a group share their parts, so each thread has a library of its own and takes whole groups.
void Search::time_all(std::vector<std::vector<Candidate>> groups) {
  std::vector<std::vector<Candidate>> legal(groups.size());
  std::vector<double> least(groups.size(), 1e300);
  std::vector<int64_t> too_large(groups.size()), refused(groups.size());
  ThreadPool pool(options_.threads);
  std::vector<std::unique_ptr<PartLibrary>> libraries;
  for (int i = 1; i < pool.size(); ++i) libraries.push_back(std::make_unique<PartLibrary>());
  pool.run(std::ssize(groups), [&](int64_t task, int worker) {
    const auto g = static_cast<size_t>(task);
    PartLibrary& parts = worker == 0 ? parts_ : *libraries[static_cast<size_t>(worker - 1)];
    for (Candidate& c : groups[g]) {
      const double weights = least_weights(c.parallel);
      if (weights > bytes_) {
        least[g] = std::min(least[g], weights);
        ++too_large[g];
      } else if (bound(parts, c)) {
        legal[g].push_back(std::move(c));
      } else {
        ++refused[g];
      }
    }
  });
  for (size_t g = 0; g < groups.size(); ++g) {
    legal_.insert(legal_.end(), legal[g].begin(), legal[g].end());
    least_bytes_ = std::min(least_bytes_, least[g]);
    result_.num_too_large += too_large[g];
    result_.num_refused += refused[g];
    result_.num_timed += std::ssize(legal[g]) + refused[g];
  }
  result_.num_legal = std::ssize(legal_) + result_.num_too_large;
}

// From the lowest bound on: once it is above the time of the last that is kept, no other can be better.
void Search::choose() {
  std::stable_sort(legal_.begin(), legal_.end(),
                   [](const Candidate& a, const Candidate& b) { return a.step_s < b.step_s; });
  for (size_t i = 0; i < legal_.size(); ++i) {
    if (is_too_slow(legal_[i].step_s)) {
      result_.num_slower = std::ssize(legal_) - static_cast<int64_t>(i);
      return;
    }
    result_.num_too_large += fit_in_memory(legal_[i]) ? 0 : 1;
  }
}

bool Search::fits(const Prediction& p) {
  const auto bytes = static_cast<double>(p.fullest_rank().total());
  if (bytes > bytes_) least_bytes_ = std::min(least_bytes_, bytes);
  return bytes <= bytes_;
}

// Each name's time and memory are taken to add up; the sets come from the fastest on.
std::vector<RecomputeSpec> Search::sets_that_may_fit(const Candidate& c, const Prediction& plain) {
  struct Estimate {
    RecomputeSpec set;
    double step_s = 0, bytes = 0;
  };
  std::vector<Estimate> all{{.step_s = plain.step_s, .bytes = static_cast<double>(plain.fullest_rank().total())}};
  for (bool RecomputeSpec::*name : recompute_names(run_.model)) {
    RecomputeSpec alone;
    alone.*name = true;
    const Prediction p = timed(c, alone, PredictOptions::Memory::fullest_stages);
    const double more_s = p.step_s - plain.step_s;
    const double more = static_cast<double>(p.fullest_rank().total() - plain.fullest_rank().total());
    for (size_t i = 0, n = all.size(); i < n; ++i) {
      Estimate with = all[i];
      with.set.*name = true;
      with.step_s += more_s;
      with.bytes += more;
      all.push_back(with);
    }
  }
  std::erase_if(all, [&](const Estimate& e) { return e.bytes > kEstimateError * bytes_; });
  std::stable_sort(all.begin(), all.end(), [](const Estimate& a, const Estimate& b) { return a.step_s < b.step_s; });
  std::vector<RecomputeSpec> sets;
  for (const Estimate& e : all)
    if (std::ssize(sets) < kMostSets) sets.push_back(e.set);
  return sets;
}

// With the recompute that fits and costs least. False: none fits.
bool Search::fit_in_memory(Candidate c) {
  using Memory = PredictOptions::Memory;
  RecomputeSpec every;
  for (bool RecomputeSpec::*name : recompute_names(run_.model)) every.*name = true;
  const RecomputeSpec layer{.layer = true};
  const auto try_set = [&](const RecomputeSpec& set) {
    if (!fits(timed(c, set, Memory::fullest_stages))) return false;
    const Prediction p = timed(c, set, Memory::all);
    if (!fits(p)) return false;
    if (!is_too_slow(p.step_s)) insert(c, set, p.step_s);
    return true;
  };
  const Prediction plain = timed(c, {}, Memory::fullest_stages);
  if (fits(plain) && try_set({})) return true;
  // Recompute frees saved tensors, and at most all of them; what else a rank holds it keeps.
  const RankMemory& rank = plain.fullest_rank();
  const auto kept = static_cast<double>(rank.total() - rank.of(Life::saved) - rank.of(Life::stack));
  if (kept > bytes_) {
    least_bytes_ = std::min(least_bytes_, kept);
    return false;
  }
  const bool some_fit = fits(timed(c, every, Memory::fullest_stages));
  if (some_fit)
    for (const RecomputeSpec& set : sets_that_may_fit(c, plain))
      if (set != RecomputeSpec{} && try_set(set)) return true;
  return (some_fit && try_set(every)) || try_set(layer);
}

// The phases of a step; both passes are one, since the slowest rank of another layout may hold the loss.
std::map<std::string, double> compared_phases(const Prediction& p) {
  std::map<std::string, double> phases;
  for (const auto& [name, seconds] : p.phases)
    phases[name == "forward" || name == "backward" ? "compute" : name] += seconds;
  return phases;
}

// Names the phases that take longer than in the best layout, the largest first.
std::string difference(const Prediction& p, const Prediction& best) {
  std::vector<std::pair<double, std::string>> longer;
  std::map<std::string, double> mine = compared_phases(p), of_best = compared_phases(best);
  for (const auto& [name, seconds] : mine) {
    const double more = (seconds - of_best[name]) / best.step_s;
    if (std::abs(more) >= 0.002) longer.emplace_back(more, name);
  }
  std::sort(longer.rbegin(), longer.rend());
  std::string text = fmt::format("{:+.1f} %", 100 * (p.step_s / best.step_s - 1));
  for (const auto& [more, name] : longer) text += fmt::format(", {} {:+.1f}", name, 100 * more);
  return text;
}

void Search::finish() {
  MOEBIUS_CHECK(usage, result_.num_legal > 0,
                "plan: no layout of {} ranks is legal for this recipe: train.global_batch = {} must be a multiple of "
                "micro_batch * dp, and dp = ranks / (tp cp pp)",
                ranks_, run_.train.global_batch);
  MOEBIUS_CHECK(usage, !best_.empty(),
                "plan: none of {} layouts fits in {:.4g} GB a rank; the least that one needs is {:.4g} GB with every "
                "recompute; use more ranks, or a larger machine",
                result_.num_legal, bytes_ / 1e9, least_bytes_ / 1e9);
  const bool names_device = asked_.device != run_.device;
  for (const Candidate& c : best_) {
    result_.layouts.push_back({.set = keys_of(run_, c), .prediction = timed(c, {})});
    if (names_device)
      result_.layouts.back().set.push_back(fmt::format("run.device=\"{}\"", machine_.is_gpu ? "cuda" : "cpu"));
  }
  std::stable_sort(result_.layouts.begin(), result_.layouts.end(), [](const FoundLayout& a, const FoundLayout& b) {
    return a.prediction.step_s < b.prediction.step_s;
  });
  for (FoundLayout& layout : result_.layouts)
    layout.why_worse = difference(layout.prediction, result_.layouts[0].prediction);
  result_.memory_bytes = bytes_;
}

}  // namespace

SearchResult search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume, const SearchOptions& options) {
  return Search(parts, run, ranks, machine, assume, options).result();
}

std::string search_text(const SearchResult& r) {
  std::string text = fmt::format(
      "{} layouts hold {} ranks: {} do not fit in {} a rank whatever is recomputed, {} are slower whatever fits; {} "
      "more are refused by the run's rules; {} predictions\n",
      r.num_legal, r.layouts.at(0).prediction.ranks, r.num_too_large, bytes_text(std::llround(r.memory_bytes)),
      r.num_slower, r.num_refused, r.num_timed);
  int place = 0;
  for (const FoundLayout& l : r.layouts) {
    const Prediction& p = l.prediction;
    text += fmt::format("{:>2}. {:.3f} s a step, {:.1f} model TFLOP/s a rank, {}  ({})\n", ++place, p.step_s,
                        p.model_tflops_per_gpu, bytes_text(p.fullest_rank().total()), l.why_worse);
    for (const std::string& key : l.set) text += " --set '" + key + "'";
    text += "\n";
  }
  return text;
}

}  // namespace moebius
