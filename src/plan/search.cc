#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "plan/print.h"

namespace moebius {
namespace {

// From what costs nothing to what costs most: the first that fits is the fastest.
constexpr std::array<RecomputeSpec, 6> kRecompute{{
    {},
    {.norm = true},
    {.norm = true, .mlp = true, .shared_expert = true},
    {.norm = true, .qkv = true, .mlp = true, .shared_expert = true},
    {.norm = true, .qkv = true, .mlp = true, .shared_expert = true, .expert_up = true},
    {.layer = true},
}};
constexpr int64_t kMicroBatches[] = {1, 2, 4, 8, 16};
// Rows that all-to-all plans for, over the even share: what a balanced run needs, with some room.
constexpr double kRowsFactor = 1.5;
// Context parallelism pays where a rank keeps long sequences; below this length there is none.
constexpr int64_t kShortest = 4096;

std::vector<int64_t> divisors(int64_t n, int64_t most) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d <= std::min(n, most); ++d)
    if (n % d == 0) all.push_back(d);
  return all;
}

bool is_power_of_two(int64_t n) { return (n & (n - 1)) == 0; }

// Names of a model that it has no layer for are refused, so they are left out.
RecomputeSpec of_model(RecomputeSpec r, const ModelSpec& m) {
  r.mlp = r.mlp && m.num_moe_layers() < m.num_layers;
  r.shared_expert = r.shared_expert && m.shared_intermediate_size > 0;
  r.expert_up = r.expert_up && m.num_moe_layers() > 0;
  return r;
}

std::string text_of(const RecomputeSpec& r) {
  std::string text;
  for (const auto& [name, field] : kRecomputeNames)
    if (r.*field) text += fmt::format("{}\"{}\"", text.empty() ? "" : ", ", name);
  return "[" + text + "]";
}

class Search {
 public:
  Search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine, const Assumptions& assume,
         const SearchOptions& options)
      : parts_(parts), run_(run), ranks_(ranks), machine_(machine), assume_(assume), options_(options) {
    run_.provenance.clear();
    run_.model.source = {};
    bytes_ = (options.memory_gb > 0 ? options.memory_gb : 0.95 * machine.memory_gb) * 1e9;
  }

  SearchResult result() {
    const ModelSpec& m = run_.model;
    const int64_t domain = static_cast<int64_t>(machine_.domain_ranks);
    const int64_t most_tp = options_.most_tp > 0 ? options_.most_tp : std::min<int64_t>(domain, 8);
    for (const int64_t pp : divisors(ranks_, m.num_layers)) {
      for (const int64_t tp : divisors(ranks_ / pp, most_tp)) {
        if (m.num_heads % tp != 0 || m.num_kv_heads % tp != 0) continue;
        for (const int64_t cp : divisors(ranks_ / (pp * tp), std::max<int64_t>(1, run_.train.seq_len / kShortest)))
          if (is_power_of_two(cp)) search_experts({.tp = tp, .cp = cp, .pp = pp});
      }
    }
    choose();
    finish();
    return std::move(result_);
  }

 private:
  struct Candidate {
    ParallelSpec parallel;
    int64_t micro_batch = 1;
    bool eager_alltoall = false;
    RecomputeSpec recompute;
    double step_s = 0;
  };

  void search_experts(ParallelSpec p) {
    const ModelSpec& m = run_.model;
    if (m.num_moe_layers() == 0) return search_batches(p);
    const int64_t here = ranks_ / p.pp;
    for (const int64_t etp : p.tp > 1 ? std::vector<int64_t>{1, p.tp} : std::vector<int64_t>{1}) {
      for (const int64_t ep : divisors(m.num_experts, here)) {
        if (here % (etp * ep) != 0 || m.moe_intermediate_size % etp != 0) continue;
        p.ep = ep;
        p.etp = etp;
        search_batches(p);
      }
    }
  }

  void search_batches(ParallelSpec p) {
    for (const int64_t vpp : p.pp > 1 ? std::vector<int64_t>{1, 2, 4} : std::vector<int64_t>{1}) {
      if (p.pp * vpp > run_.model.num_layers) continue;
      p.vpp = vpp;
      p.layout = p.pp > 1 ? balanced_layout(run_.model, p.pp * vpp) : "";
      for (const int64_t micro_batch : kMicroBatches) {
        const int64_t dp = ranks_ / (p.tp * p.cp * p.pp);
        if (run_.train.global_batch % (micro_batch * dp) != 0) continue;
        const int64_t count = run_.train.global_batch / (micro_batch * dp);
        if (p.vpp > 1 && count % p.pp != 0) continue;
        const bool exchanges = p.ep * p.etp > 1;
        if (!exchanges || assume_.system == PlanSystem::moebius) consider({.parallel = p, .micro_batch = micro_batch});
        if (exchanges) consider({.parallel = p, .micro_batch = micro_batch, .eager_alltoall = true});
      }
    }
  }

  RunSpec run_of(const Candidate& c) const {
    RunSpec run = run_;
    run.parallel = c.parallel;
    run.parallel.overlap = run_.parallel.overlap;
    run.train.micro_batch = c.micro_batch;
    run.memory.recompute = c.recompute;
    if (c.eager_alltoall) {
      run.parallel.dispatcher = DispatcherKind::alltoall;
      run.graph = false;
      run.moe.rank_rows_factor = kRowsFactor;
    }
    return run;
  }

  // All-to-all reads its counts back, so its steps are eager.
  Assumptions assumed(const Candidate& c) const {
    Assumptions a = assume_;
    if (c.eager_alltoall && a.system == PlanSystem::moebius) a.graphs = PlanGraphs::none;
    return a;
  }

  Prediction timed(const Candidate& c, const PredictOptions& options) {
    ++result_.num_timed;
    return predict(parts_, run_of(c), ranks_, machine_, assumed(c), options);
  }

  bool is_too_slow(double step_s) const { return std::ssize(best_) >= options_.keep && step_s >= best_.back().step_s; }

  // Recompute only adds time, so its absence bounds the time from below.
  void consider(Candidate c) {
    try {
      c.step_s = timed(c, {.simulate = false, .memory = PredictOptions::Memory::none}).step_s;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::usage) throw;
      return;
    }
    ++result_.num_legal;
    legal_.push_back(std::move(c));
  }

  // From the lowest bound on: once it is above the time of the last that is kept, no other can be better.
  void choose() {
    std::sort(legal_.begin(), legal_.end(), [](const Candidate& a, const Candidate& b) { return a.step_s < b.step_s; });
    for (size_t i = 0; i < legal_.size(); ++i) {
      if (is_too_slow(legal_[i].step_s)) {
        result_.num_slower = std::ssize(legal_) - static_cast<int64_t>(i);
        return;
      }
      result_.num_too_large += fit_in_memory(legal_[i]) ? 0 : 1;
    }
  }

  // With the least recompute that fits.
  bool fit_in_memory(Candidate c) {
    const PredictOptions options{.simulate = false, .memory = PredictOptions::Memory::fullest_stages};
    const auto fits = [&](double bytes) {
      if (bytes > bytes_) least_bytes_ = std::min(least_bytes_, bytes);
      return bytes <= bytes_;
    };
    const Prediction whole = timed(c, options);
    double held = 0;  // whatever is recomputed
    for (const Life life : {Life::param, Life::master, Life::grad, Life::optimizer, Life::comm})
      held += static_cast<double>(whole.fullest_rank().of(life));
    if (held > bytes_) return fits(static_cast<double>(held));
    for (const RecomputeSpec& recompute : kRecompute) {
      c.recompute = of_model(recompute, run_.model);
      const auto bytes = [&](PredictOptions::Memory of) {
        return static_cast<double>(timed(c, {.simulate = false, .memory = of}).fullest_rank().total());
      };
      if (!fits(bytes(PredictOptions::Memory::fullest_stages)) || !fits(bytes(PredictOptions::Memory::all))) continue;
      const Prediction p = timed(c, {.simulate = false, .memory = PredictOptions::Memory::none});
      if (!is_too_slow(p.step_s)) insert(c, p.step_s);
      return true;
    }
    return false;
  }

  void insert(Candidate c, double step_s) {
    c.step_s = step_s;
    const auto at = std::upper_bound(best_.begin(), best_.end(), step_s,
                                     [](double s, const Candidate& other) { return s < other.step_s; });
    best_.insert(at, std::move(c));
    if (std::ssize(best_) > options_.keep) best_.pop_back();
  }

  std::vector<std::string> keys(const Candidate& c) const;
  void finish();

  PartLibrary& parts_;
  RunSpec run_;
  int64_t ranks_;
  const PlanMachine& machine_;
  const Assumptions& assume_;
  const SearchOptions& options_;
  double bytes_ = 0, least_bytes_ = 1e300;
  std::vector<Candidate> legal_, best_;  // best_: by time
  SearchResult result_;
};

std::vector<std::string> Search::keys(const Candidate& c) const {
  const ParallelSpec& p = c.parallel;
  std::vector<std::string> set{fmt::format("parallel.tp={}", p.tp),
                               fmt::format("parallel.cp={}", p.cp),
                               fmt::format("parallel.pp={}", p.pp),
                               fmt::format("parallel.vpp={}", p.vpp),
                               fmt::format("parallel.ep={}", p.ep),
                               fmt::format("parallel.etp={}", p.etp),
                               fmt::format("train.micro_batch={}", c.micro_batch),
                               fmt::format("memory.recompute={}", text_of(c.recompute))};
  if (!p.layout.empty()) set.push_back(fmt::format("parallel.layout=\"{}\"", p.layout));
  if (c.eager_alltoall) {
    set.emplace_back("parallel.dispatcher=\"alltoall\"");
    set.emplace_back("run.graph=false");
    set.push_back(fmt::format("moe.rank_rows_factor={}", kRowsFactor));
  }
  return set;
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
                "plan: none of {} layouts fits in {:.1f} GB a rank; the least that one needs is {:.1f} GB with every "
                "recompute; use more ranks, or a larger machine",
                result_.num_legal, bytes_ / 1e9, least_bytes_ / 1e9);
  for (const Candidate& c : best_) result_.layouts.push_back({.set = keys(c), .prediction = timed(c, {})});
  std::sort(result_.layouts.begin(), result_.layouts.end(),
            [](const FoundLayout& a, const FoundLayout& b) { return a.prediction.step_s < b.prediction.step_s; });
  for (FoundLayout& layout : result_.layouts)
    layout.why_worse = difference(layout.prediction, result_.layouts[0].prediction);
}

// A head's arithmetic, in layers: one token's parameters of both.
double head_in_layers(const ModelSpec& m) {
  const double head = static_cast<double>(m.vocab_size * m.hidden_size);
  const double tables = head * (m.tie_word_embeddings ? 1 : 2);
  const double layers = static_cast<double>(m.num_active_parameters()) - tables;
  return head * static_cast<double>(m.num_layers_and_mtp()) / layers;
}

}  // namespace

// The stages before the last get as many layers each as they can; the last gets so many that the longest
// stage is shortest.
std::string balanced_layout(const ModelSpec& m, int64_t num_stages) {
  const int64_t S = num_stages, mtp = m.num_mtp_layers;
  const double heads = head_in_layers(m) * static_cast<double>(1 + mtp), all = static_cast<double>(m.num_layers + mtp);
  const bool apart = mtp > 0 && S > 2 && heads > (all + heads) / static_cast<double>(S);  // L has a stage of its own
  const int64_t layers = m.num_layers + (apart ? mtp : 0);
  int64_t last = 0;
  for (int64_t n = 1; n < layers && !apart; ++n) {
    const auto longest = [&](int64_t in_last) {
      return std::max(static_cast<double>(div_ceil(layers - in_last, S - 1)),
                      static_cast<double>(in_last + mtp) + heads);
    };
    if (longest(n) <= longest(last) && layers - n >= S - 1) last = n;
  }
  const int64_t before = layers - last, each = div_ceil(before, S - 1), shorter = each * (S - 1) - before;
  std::string text = "E";
  for (int64_t s = 0; s < S; ++s) {
    const bool is_last = s == S - 1, has_mtp = apart ? s == S - 2 : is_last;
    const int64_t units = is_last ? last : s < shorter ? each - 1 : each;
    const int64_t in_stage = units - (apart && has_mtp ? mtp : 0);
    if (s > 0) text += " |";
    if (in_stage > 0) text += fmt::format(" t*{}", in_stage);
    if (has_mtp && mtp > 0)
      text += fmt::format("{}{}", in_stage > 0 ? "" : " ", std::string(static_cast<size_t>(mtp), 'm'));
    if (is_last) text += " L";
  }
  return text;
}

SearchResult search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume, const SearchOptions& options) {
  return Search(parts, run, ranks, machine, assume, options).result();
}

std::string search_text(const SearchResult& r) {
  std::string text = fmt::format(
      "{} legal layouts: {} of the fastest do not fit whatever is recomputed, {} are slower whatever fits; {} "
      "predictions\n",
      r.num_legal, r.num_too_large, r.num_slower, r.num_timed);
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
