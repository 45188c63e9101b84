#include "plan/search_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "config/recipe/memory_keys.h"
#include "core/error.h"

namespace moebius {
namespace {

constexpr int64_t kMicroBatches[] = {1, 2, 3, 4, 6, 8, 12, 16};
constexpr int64_t kVirtual[] = {1, 2, 3, 4, 6, 8, 12};
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

class Space {
 public:
  Space(const RunSpec& run, int64_t ranks, const SearchLimits& limits) : run_(run), ranks_(ranks), limits_(limits) {
    if (limits_.recipes.empty()) limits_.recipes = {run.precision.recipe};
  }

  std::vector<std::vector<Candidate>> all() {
    const ModelSpec& m = run_.model;
    const int64_t most_cp = std::max<int64_t>(1, run_.train.seq_len / kShortest);
    for (const int64_t pp : divisors(ranks_, m.num_layers)) {
      for (const int64_t tp : divisors(ranks_ / pp, limits_.most_tp)) {
        if (m.num_heads % tp != 0 || m.num_kv_heads % tp != 0) continue;
        for (const int64_t cp : divisors(ranks_ / (pp * tp), most_cp))
          if (is_power_of_two(cp)) add_experts({.tp = tp, .cp = cp, .pp = pp});
      }
    }
    std::vector<std::vector<Candidate>> groups;
    for (auto& [key, group] : groups_) groups.push_back(std::move(group));
    return groups;
  }

 private:
  void add_experts(ParallelSpec p) {
    const ModelSpec& m = run_.model;
    if (m.num_moe_layers() == 0) return add_dispatchers(p);
    const int64_t here = ranks_ / p.pp;
    for (const int64_t etp : divisors(here, limits_.most_tp)) {
      for (const int64_t ep : divisors(m.num_experts, here)) {
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
    if (exchanges && p.ep * p.etp <= limits_.most_direct) kinds.push_back(DispatcherKind::direct);
    // The exchange of rows by other software does not depend on our dispatcher.
    if (exchanges && limits_.system == PlanSystem::megatron) kinds = {DispatcherKind::alltoall};
    std::vector<CpComm> exchanges_of_cp{run_.parallel.cp_comm};
    if (p.cp > 1) exchanges_of_cp = {CpComm::allgather, CpComm::ring, CpComm::alltoall};
    for (const DispatcherKind kind : kinds) {
      for (const CpComm comm : exchanges_of_cp) {
        p.dispatcher = kind;
        p.cp_comm = comm;
        add_batches(p);
      }
    }
  }

  void add_batches(ParallelSpec p) {
    const int64_t dp = ranks_ / (p.tp * p.cp * p.pp);
    for (const int64_t vpp : kVirtual) {
      if (p.pp * vpp > run_.model.num_layers || (p.pp == 1 && vpp > 1)) break;
      p.vpp = vpp;
      p.layout = p.pp > 1 ? balanced_layout(run_.model, p.pp * vpp) : "";
      for (const int64_t micro_batch : kMicroBatches) {
        if (run_.train.global_batch % (micro_batch * dp) != 0) continue;
        if (vpp > 1 && run_.train.global_batch / (micro_batch * dp) % p.pp != 0) continue;
        for (const PrecisionRecipe recipe : limits_.recipes)
          groups_[key_of(p, micro_batch, recipe)].push_back(
              {.parallel = p, .micro_batch = micro_batch, .recipe = recipe});
      }
    }
  }

  static std::string key_of(const ParallelSpec& p, int64_t micro_batch, PrecisionRecipe recipe) {
    return fmt::format("{} {} {} {} {} {} {} {}", p.tp, p.cp, p.ep, p.etp, static_cast<int>(p.dispatcher),
                       static_cast<int>(p.cp_comm), micro_batch, static_cast<int>(recipe));
  }

  const RunSpec& run_;
  int64_t ranks_;
  SearchLimits limits_;
  std::map<std::string, std::vector<Candidate>> groups_;
};

double rows_factor(const RunSpec& run) { return run.moe.rank_rows_factor > 0 ? run.moe.rank_rows_factor : kRowsFactor; }

const char* name_of(CpComm comm) {
  return comm == CpComm::ring ? "ring" : comm == CpComm::alltoall ? "alltoall" : "allgather";
}

// A head's arithmetic, in layers: one token's parameters of both.
double head_in_layers(const ModelSpec& m) {
  const double head = static_cast<double>(m.vocab_size * m.hidden_size);
  const double tables = head * (m.tie_word_embeddings ? 1 : 2);
  const double layers = static_cast<double>(m.num_active_parameters()) - tables;
  return head * static_cast<double>(m.num_layers_and_mtp()) / layers;
}

}  // namespace

std::vector<std::vector<Candidate>> search_space(const RunSpec& run, int64_t ranks, const SearchLimits& limits) {
  return Space(run, ranks, limits).all();
}

RunSpec run_of(const RunSpec& of, const Candidate& c) {
  RunSpec run = of;
  const bool overlap = of.parallel.overlap;
  run.parallel = c.parallel;
  run.parallel.overlap = overlap;
  run.train.micro_batch = c.micro_batch;
  run.precision.recipe = c.recipe;
  run.memory.recompute = c.recompute;
  if (c.parallel.dispatcher == DispatcherKind::alltoall) {
    run.graph = false;
    run.moe.rank_rows_factor = rows_factor(of);
  }
  return run;
}

std::vector<std::string> keys_of(const RunSpec& run, const Candidate& c) {
  const ParallelSpec& p = c.parallel;
  std::vector<std::string> set{fmt::format("parallel.tp={}", p.tp),
                               fmt::format("parallel.cp={}", p.cp),
                               fmt::format("parallel.pp={}", p.pp),
                               fmt::format("parallel.vpp={}", p.vpp),
                               fmt::format("parallel.ep={}", p.ep),
                               fmt::format("parallel.etp={}", p.etp),
                               fmt::format("train.micro_batch={}", c.micro_batch),
                               fmt::format("memory.recompute={}", recompute_list(c.recompute))};
  set.push_back(fmt::format("parallel.layout=\"{}\"", p.layout));
  const CpComm comm = p.cp > 1 ? p.cp_comm : CpComm::allgather;
  if (p.cp > 1 || run.parallel.cp_comm != comm) set.push_back(fmt::format("parallel.cp_comm=\"{}\"", name_of(comm)));
  if (run.parallel.cp_inner > 1) set.emplace_back("parallel.cp_inner=1");  // no candidate is hierarchical
  if (c.recipe != run.precision.recipe) set.push_back(fmt::format("precision.recipe=\"{}\"", name_of(c.recipe)));
  if (p.dispatcher == DispatcherKind::automatic) set.emplace_back("parallel.dispatcher=\"auto\"");
  if (p.dispatcher == DispatcherKind::allgather) set.emplace_back("parallel.dispatcher=\"allgather\"");
  if (p.dispatcher == DispatcherKind::direct) set.emplace_back("parallel.dispatcher=\"direct\"");
  if (p.dispatcher == DispatcherKind::alltoall) {
    set.emplace_back("parallel.dispatcher=\"alltoall\"");
    set.emplace_back("run.graph=false");
    set.push_back(fmt::format("moe.rank_rows_factor={}", rows_factor(run)));
  }
  return set;
}

// Names of a model that it has no layer for are refused, so they are left out.
std::vector<bool RecomputeSpec::*> recompute_names(const ModelSpec& m) {
  std::vector<bool RecomputeSpec::*> names{&RecomputeSpec::norm, &RecomputeSpec::qkv, &RecomputeSpec::attention};
  if (m.kv_lora_rank > 0) names.push_back(&RecomputeSpec::mla_up_proj);
  if (m.num_moe_layers() < m.num_layers) names.push_back(&RecomputeSpec::mlp);
  if (m.shared_intermediate_size > 0) names.push_back(&RecomputeSpec::shared_expert);
  if (m.num_moe_layers() > 0) names.push_back(&RecomputeSpec::expert_up);
  return names;
}

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

}  // namespace moebius
