#include "config/check/context_parallel_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {
namespace {

bool has_windows(const ModelSpec& m) {
  for (int64_t layer = 0; layer < m.num_layers; ++layer) {
    if (m.window_of(layer) > 0) return true;
  }
  return false;
}

// Returns the cp nearest to this one, the smaller of two, into which the ranks can be grouped and for which the
// sequence can be cut, heads shared where some layers do, and two levels made where some layers have them.
int64_t nearest_cp(const RunSpec& s, int64_t ranks) {
  const ParallelSpec& p = s.parallel;
  const bool shares_heads = p.cp_comm == CpComm::alltoall || p.cp_comm_window == CpComm::alltoall;
  const int64_t heads = s.model.num_kv_heads / p.tp, groups = ranks / (p.tp * p.pp),
                most = std::min(groups, s.train.seq_len / 2);
  int64_t nearest = 1;
  for (int64_t cp = 2; cp <= most; ++cp) {
    if (groups % cp != 0 || s.train.seq_len % (2 * cp) != 0) continue;
    if (shares_heads && heads % cp != 0) continue;
    if (p.dynamic_cp && !std::has_single_bit(static_cast<uint64_t>(cp))) continue;
    if (p.is_hierarchical() && p.cp_inner > 1 && (cp % p.cp_inner != 0 || cp == p.cp_inner)) continue;
    if (std::abs(cp - p.cp) < std::abs(nearest - p.cp)) nearest = cp;
  }
  return nearest;
}

// Returns "parallel.cp = 2": the nearest one, and for 1 the keys of cp that must be removed with it.
std::string nearest_choice(const RunSpec& s, int64_t ranks) {
  const ParallelSpec& p = s.parallel;
  const int64_t nearest = nearest_cp(s, ranks);
  std::vector<const char*> idle;
  if (nearest == 1) {
    const ParallelSpec defaults;
    if (p.cp_comm != defaults.cp_comm) idle.push_back("parallel.cp_comm");
    if (p.cp_comm_window != defaults.cp_comm_window) idle.push_back("parallel.cp_comm_window");
    if (p.cp_inner != defaults.cp_inner) idle.push_back("parallel.cp_inner");
    if (p.dynamic_cp) idle.push_back("parallel.dynamic_cp");
  }
  return fmt::format("parallel.cp = {}{}{}", nearest, idle.empty() ? "" : " and remove ", fmt::join(idle, " and "));
}

void check_heads(const RunSpec& s, int64_t ranks, const char* key, CpComm comm) {
  const ModelSpec& m = s.model;
  const ParallelSpec& p = s.parallel;
  MOEBIUS_CHECK(usage, comm != CpComm::alltoall || m.num_kv_heads % (p.tp * p.cp) == 0,
                "{} = \"alltoall\" shares heads: tp * cp = {} * {} must divide model.num_key_value_heads = {}; choose "
                "\"allgather\" or \"ring\", or {}{}",
                key, p.tp, p.cp, m.num_kv_heads, nearest_choice(s, ranks), origin(s, key));
}

// Returns the values of cp_inner that make two levels, in words.
std::string inner_choices(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  std::vector<int64_t> choices;
  for (int64_t inner = 2; inner <= p.cp / 2; ++inner) {
    if (p.cp % inner == 0 && s.model.num_kv_heads / p.tp % inner == 0) choices.push_back(inner);
  }
  if (choices.empty()) return "none is left; choose another parallel.cp_comm";
  return fmt::format("choose {}", fmt::join(choices, " or "));
}

// Returns whether some cp_inner makes two levels of a cp that the sequence can be cut for.
bool has_levels(const RunSpec& s, int64_t cp) {
  if (cp < 4 || s.train.seq_len % (2 * cp) != 0) return false;
  const int64_t shared = std::gcd(cp, s.model.num_kv_heads / s.parallel.tp);
  return largest_divisor(shared, cp / 2) > 1;
}

// Returns "or parallel.cp = 8, which needs a multiple of 8 ranks": the cp nearest to this one that has two levels.
std::string nearest_with_levels(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  const int64_t most = s.train.seq_len / 2, from = std::min(p.cp, most + 1);
  for (int64_t apart = 1; apart <= std::max(from, most); ++apart) {
    for (const int64_t cp : {from - apart, from + apart}) {
      if (has_levels(s, cp))
        return fmt::format("or parallel.cp = {}, which needs a multiple of tp * cp * pp = {} ranks", cp,
                           p.tp * cp * p.pp);
    }
  }
  return "since no parallel.cp has two levels with this length and these heads";
}

void check_levels(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  if (!p.is_hierarchical())
    return refuse_idle(s, "parallel.cp_inner",
                       "it is read by parallel.cp_comm = \"hierarchical\"; set that, or remove it");
  const char* key = p.cp_comm == CpComm::hierarchical ? "parallel.cp_comm" : "parallel.cp_comm_window";
  MOEBIUS_CHECK(usage, largest_divisor(p.cp, p.cp - 1) > 1,
                "{} = \"hierarchical\" splits the ranks of cp into equal groups of at least 2: parallel.cp must be at "
                "least 4 and not a prime number; got {}; choose \"allgather\", \"ring\" or \"alltoall\", {}{}",
                key, p.cp, nearest_with_levels(s), origin(s, key));
  const bool levels = p.cp_inner > 1 && p.cp_inner < p.cp && p.cp % p.cp_inner == 0;
  MOEBIUS_CHECK(usage, levels && s.model.num_kv_heads % (p.tp * p.cp_inner) == 0,
                "parallel.cp_inner must be above 1 and below parallel.cp = {}, and divide it, and tp * cp_inner = {} * "
                "{} must divide model.num_key_value_heads = {}, for parallel.cp_comm = \"hierarchical\"; got {}; {}{}",
                p.cp, p.tp, p.cp_inner, s.model.num_kv_heads, p.cp_inner, inner_choices(s),
                origin(s, "parallel.cp_inner"));
}

// Returns "the nearest are 32 and 40, or parallel.cp = 1". A length beyond the positions of the model is refused
// with each cp, so no other cp is named then.
std::string lengths_or_cp(const RunSpec& s, int64_t ranks) {
  const int64_t of = 2 * s.parallel.cp, positions = s.model.max_position_embeddings, seq_len = s.train.seq_len;
  if (of > positions)
    return seq_len > positions ? "choose a smaller parallel.cp and a length within the positions of the model"
                               : "choose " + nearest_choice(s, ranks);
  if (seq_len > positions)
    return fmt::format("the nearest within model.max_position_embeddings = {} {}", positions,
                       nearest_multiples(positions, of, positions));
  return fmt::format("the nearest {}, or {}", nearest_multiples(seq_len, of, positions), nearest_choice(s, ranks));
}

void check_dynamic(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  if (!p.dynamic_cp) return;
  const auto refuse = [&](bool unless, const std::string& why) {
    MOEBIUS_CHECK(usage, unless, "parallel.dynamic_cp = true {}{}", why, origin(s, "parallel.dynamic_cp"));
  };
  refuse((p.cp & (p.cp - 1)) == 0,
         fmt::format("needs a parallel.cp that is a power of two; got {}; the nearest are {} and {}", p.cp,
                     std::bit_floor(static_cast<uint64_t>(p.cp)), std::bit_ceil(static_cast<uint64_t>(p.cp))));
  refuse(
      s.data.separate_documents && s.data.pack_documents,
      "keeps documents whole on some ranks of cp; set data.separate_documents and data.pack_documents, or remove it");
  refuse(!p.is_hierarchical(), "has no two levels; choose another parallel.cp_comm");
  refuse(s.lora.dropout == 0, "cannot draw lora.dropout as one rank does; set lora.dropout = 0, or remove it");
}

}  // namespace

void check_context_parallel(const RunSpec& s, int64_t ranks) {
  const ParallelSpec& p = s.parallel;
  if (p.cp == 1) {
    for (const char* key : {"parallel.cp_comm", "parallel.cp_comm_window", "parallel.cp_inner", "parallel.dynamic_cp"})
      refuse_idle(s, key, "parallel.cp is 1; remove it, or set cp");
    return;
  }
  if (!has_windows(s.model))
    refuse_idle(s, "parallel.cp_comm_window",
                "no layer of the model has a window (model.sliding_window, for some families with "
                "model.use_sliding_window = true); remove it");
  check_heads(s, ranks, "parallel.cp_comm", p.cp_comm);
  if (p.cp_comm_window) check_heads(s, ranks, "parallel.cp_comm_window", *p.cp_comm_window);
  check_levels(s);
  check_dynamic(s);
  MOEBIUS_CHECK(usage, s.train.seq_len % (2 * p.cp) == 0,
                "train.seq_len must be divisible by 2 * parallel.cp = {}; got {}; {}{}", 2 * p.cp, s.train.seq_len,
                lengths_or_cp(s, ranks), origin(s, "train.seq_len"));
}

void check_rows_of_tp(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  const int64_t seq_len = s.train.seq_len, positions = s.model.max_position_embeddings,
                rows = s.train.micro_batch * seq_len / p.cp;
  if (rows % p.tp == 0 || seq_len > positions) return;  // too long a sequence is refused as such
  // Lengths whose rows tp divides, and of which a rank of cp has two equal pieces.
  const int64_t of = std::lcm(p.tp / std::gcd(p.tp, s.train.micro_batch), p.cp > 1 ? int64_t{2} : int64_t{1}) * p.cp;
  const std::string lengths = of > positions ? "choose another"
                                             : fmt::format("the nearest train.seq_len {}, or choose another",
                                                           nearest_multiples(seq_len, of, positions));
  MOEBIUS_FAIL(
      usage,
      "parallel.tp = {} must divide the tokens of a micro-batch on a rank, train.micro_batch * train.seq_len / "
      "parallel.cp = {} * {} / {} = {}; {} train.micro_batch or parallel.tp{}",
      p.tp, s.train.micro_batch, seq_len, p.cp, rows, lengths, origin(s, "parallel.tp"));
}

}  // namespace moebius
