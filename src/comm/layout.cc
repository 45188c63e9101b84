#include "comm/layout.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "comm/collective_levels.h"
#include "core/error.h"

namespace moebius {
namespace {

constexpr int kDigits = 5;  // coordinates of a view, the one that changes fastest first
using Digits = std::array<int64_t, kDigits>;

// An axis is a choice of digits in one view. Its groups are the ranks that differ only
// in these digits.
struct AxisDef {
  std::string_view name;
  bool expert;  // in the expert view
  std::array<bool, kDigits> varies;
  std::string_view purpose;
};

// The digits of the two views, the one that changes fastest first; the expert view has none in the last place.
enum class Dense { tp, cp_inner, cp_outer, dp, pp };
enum class Expert { etp, ep, edp, pp };

template <class Digit>
constexpr AxisDef make_axis(std::string_view name, std::initializer_list<Digit> digits, std::string_view purpose) {
  AxisDef def{.name = name, .expert = std::is_same_v<Digit, Expert>, .varies = {}, .purpose = purpose};
  for (const Digit digit : digits) def.varies[static_cast<size_t>(digit)] = true;
  return def;
}

constexpr std::array<AxisDef, kNumAxes> kAxes = {
    make_axis("tp", {Dense::tp}, "one layer's matrices, split"),
    make_axis("cp", {Dense::cp_inner, Dense::cp_outer}, "one sequence, split"),
    make_axis("dp", {Dense::dp}, "copies of the model on different data: balance losses"),
    make_axis("pp", {Dense::pp}, "the stages of one pipeline: hidden states, the loss"),
    make_axis("pp_back", {Dense::pp}, "the stages of one pipeline: gradients of hidden states"),
    make_axis("etp", {Expert::etp}, "one expert's matrices, split"),
    make_axis("ep", {Expert::ep}, "the experts of one layer: dispatch and combine"),
    make_axis("edp", {Expert::edp}, "copies of the same experts: gradients of experts"),
    make_axis("tp_cp", {Dense::tp, Dense::cp_inner, Dense::cp_outer},
              "the tokens of one micro-batch: its balance losses"),
    make_axis("dp_cp", {Dense::cp_inner, Dense::cp_outer, Dense::dp},
              "copies of the dense parameters: their gradients and weights"),
    make_axis("tp_cp_dp", {Dense::tp, Dense::cp_inner, Dense::cp_outer, Dense::dp},
              "one pipeline stage: gradients of parameters that tp does not split, expert loads, z-loss"),
    make_axis("etp_ep", {Expert::etp, Expert::ep}, "one copy of all experts of a layer"),
    make_axis("etp_edp", {Expert::etp, Expert::edp},
              "copies of parameters that etp does not split: gradients of experts' adapters"),
    make_axis("tp_pp", {Dense::tp, Dense::pp}, "one copy of the dense parameters: unused in a step"),
    make_axis("etp_ep_pp", {Expert::etp, Expert::ep, Expert::pp}, "one copy of the experts: unused in a step"),
    make_axis("cp_inner", {Dense::cp_inner}, "one sequence, split inside a fast domain: all-to-all of rows and heads"),
    make_axis("cp_outer", {Dense::cp_outer}, "one sequence, split over fast domains: keys and values"),
    make_axis("world", {Dense::tp, Dense::cp_inner, Dense::cp_outer, Dense::dp, Dense::pp},
              "all ranks: gradient norm, decisions of the run"),
};

const AxisDef& def_of(Axis axis) { return kAxes[static_cast<int>(axis)]; }
Digits dense(const MeshShape& s) { return {s.tp, s.cp_inner, s.cp_outer(), s.dp, s.pp}; }
Digits expert(const MeshShape& s) { return {s.etp, s.ep, s.edp, s.pp, 1}; }

Digits digits_of(const Digits& radix, int64_t rank) {
  Digits digits;
  for (int i = 0; i < kDigits; ++i) {
    digits[i] = rank % radix[i];
    rank /= radix[i];
  }
  return digits;
}

int rank_of(const Digits& radix, const Digits& digits) {
  int64_t rank = 0;
  for (int i = kDigits - 1; i >= 0; --i) rank = rank * radix[i] + digits[i];
  return static_cast<int>(rank);
}

// Returns a * b * c, or a number above INT32_MAX when the product is above it.
int64_t bounded_product(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (product > INT32_MAX / factor) return int64_t{INT32_MAX} + 1;
    product *= factor;
  }
  return product;
}

void check_fsdp_shard(const MeshShape& shape) {
  MOEBIUS_CHECK(usage, shape.fsdp_shard == 0 || shape.fsdp_shard >= 2,
                "mesh: fsdp_shard must be at least 2, or 0 for all ranks that hold the same weights; got {}",
                shape.fsdp_shard);
  for (const Axis axis : kGradAxes) {
    const int64_t size = group_size(shape, axis), shard = shard_size(shape, axis);
    MOEBIUS_CHECK(usage, size % shard == 0,
                  "mesh: fsdp_shard must divide the size of the group {}, {} % {} must be 0; choose a divisor of {}",
                  name_of(axis), size, shard, size);
  }
}

}  // namespace

std::string_view name_of(Axis axis) { return def_of(axis).name; }
std::string_view purpose_of(Axis axis) { return def_of(axis).purpose; }

void MeshShape::check() const {
  const std::pair<const char*, int64_t> degrees[] = {{"tp", tp},   {"cp", cp}, {"dp", dp},  {"pp", pp},
                                                     {"etp", etp}, {"ep", ep}, {"edp", edp}};
  for (const auto& [name, degree] : degrees)
    MOEBIUS_CHECK(usage, degree >= 1 && degree <= INT32_MAX, "mesh: {} must be from 1 to {}; got {}", name, INT32_MAX,
                  degree);
  MOEBIUS_CHECK(usage,
                bounded_product({tp, cp, dp, pp}) <= INT32_MAX && bounded_product({etp, ep, edp, pp}) <= INT32_MAX,
                "mesh: at most {} ranks; got tp*cp*dp*pp = {}*{}*{}*{}, etp*ep*edp*pp = {}*{}*{}*{}", INT32_MAX, tp, cp,
                dp, pp, etp, ep, edp, pp);
  MOEBIUS_CHECK(usage, tp * cp * dp == etp * ep * edp,
                "mesh: a stage of the pipeline must have the same ranks in both views; got tp*cp*dp = {}*{}*{} = {}, "
                "etp*ep*edp = {}*{}*{} = {}",
                tp, cp, dp, tp * cp * dp, etp, ep, edp, etp * ep * edp);
  MOEBIUS_CHECK(usage, cp_inner >= 1 && cp % cp_inner == 0,
                "mesh: cp_inner must divide cp, {} % {} must be 0; choose a divisor of cp", cp, cp_inner);
  MOEBIUS_CHECK(usage, ranks_per_node >= 1 && ranks_per_node <= CollectiveLevels::kMaxRadix,
                "mesh: ranks_per_node must be from 1 to {}; got {}", CollectiveLevels::kMaxRadix, ranks_per_node);
  check_fsdp_shard(*this);
}

RankPlace place_of(const MeshShape& shape, int world_rank) {
  const Digits d = digits_of(dense(shape), world_rank), e = digits_of(expert(shape), world_rank);
  return {.tp = d[0], .cp = d[1] + shape.cp_inner * d[2], .dp = d[3], .pp = d[4], .etp = e[0], .ep = e[1], .edp = e[2]};
}

int rank_in_dense_view(const MeshShape& shape, const RankPlace& p) {
  return rank_of(dense(shape), {p.tp, p.cp % shape.cp_inner, p.cp / shape.cp_inner, p.dp, p.pp});
}

int rank_in_expert_view(const MeshShape& shape, const RankPlace& p) {
  return rank_of(expert(shape), {p.etp, p.ep, p.edp, p.pp, 0});
}

int64_t group_size(const MeshShape& shape, Axis axis) {
  const AxisDef& def = def_of(axis);
  const Digits radix = def.expert ? expert(shape) : dense(shape);
  int64_t size = 1;
  for (int i = 0; i < kDigits; ++i) size *= def.varies[i] ? radix[i] : 1;
  return size;
}

// Goes through the digits, the one that changes fastest first. A node has `left` blocks of the ranks so far.
int64_t ranks_on_node(const MeshShape& shape, Axis axis) {
  const AxisDef& def = def_of(axis);
  const Digits radix = def.expert ? expert(shape) : dense(shape);
  int64_t on_node = 1, left = shape.ranks_per_node;
  for (int i = 0; i < kDigits && left > 1 && on_node < group_size(shape, axis);) {
    const bool varies = def.varies[i];
    int64_t ranks = 1;  // of neighbouring digits that all vary in a group, or all do not
    for (; i < kDigits && (def.varies[i] == varies || radix[i] == 1); ++i) ranks *= radix[i];
    const int64_t shared = std::min(left, ranks);
    if (left % ranks != 0 && (varies ? ranks % left != 0 : ranks < left)) return 1;
    if (varies) on_node *= shared;
    left /= shared;
  }
  return on_node;
}

int64_t shard_size(const MeshShape& shape, Axis grad_axis) {
  const int64_t size = group_size(shape, grad_axis);
  return shape.fsdp_shard == 0 ? size : std::min(size, shape.fsdp_shard);
}

std::vector<int> ranks_of_group(const MeshShape& shape, Axis axis, int world_rank) {
  const AxisDef& def = def_of(axis);
  const Digits radix = def.expert ? expert(shape) : dense(shape);
  // Counts through the digits that vary, the first of them fastest, so that ranks
  // come out ascending.
  Digits steps;
  for (int i = 0; i < kDigits; ++i) steps[i] = def.varies[i] ? radix[i] : 1;
  std::vector<int> ranks;
  for (int64_t n = 0; n < group_size(shape, axis); ++n) {
    Digits digits = digits_of(radix, world_rank);
    const Digits varied = digits_of(steps, n);
    for (int i = 0; i < kDigits; ++i) digits[i] = def.varies[i] ? varied[i] : digits[i];
    ranks.push_back(rank_of(radix, digits));
  }
  return ranks;
}

std::string to_string(const RankPlace& p) {
  return fmt::format("tp {}, cp {}, dp {}, pp {}, etp {}, ep {}, edp {}", p.tp, p.cp, p.dp, p.pp, p.etp, p.ep, p.edp);
}

}  // namespace moebius
