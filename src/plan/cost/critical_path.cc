#include "plan/cost/critical_path.h"

#include <algorithm>
#include <cmath>

#include "model/attention/gqa_params.h"
#include "model/attention/token_runs.h"

namespace moebius {
namespace {

// Steps of a sum or maximum over the lanes of a warp.
constexpr double kLaneSteps = 5;

double ceil_div(double a, double b) { return std::ceil(a / b); }

// A block adds `parts` rows for 32 columns in 16 strips, eight loads at a time, and then the strips
// (ops/cuda/add_rows.cu).
CriticalPath add_rows_path(double parts) {
  constexpr double kStrips = 16, kAtOnce = 8;
  return {.loads = ceil_div(parts, kStrips * kAtOnce), .on_chip = kStrips - 1};
}

// A block takes several rows in turn, each with a sum over the block (ops/norm/cuda/norm.cu).
CriticalPath norm_bwd_path(double rows, double width) {
  const double parts = std::min(rows, 264 * std::clamp(std::floor(8192 / width + 0.5), 1.0, 8.0));
  CriticalPath path{.loads = ceil_div(rows, parts), .on_chip = ceil_div(rows, parts) * (kLaneSteps + 2)};
  return path += add_rows_path(parts);
}

// The FLOPs of a norm's backward pass are ten of each element (ops/norm/norm.cc).
double width_of_norm(const OpWork& op, double rows) {
  return op.cost.flops / static_cast<double>(op.calls) / 10 / rows;
}

// With norms over all heads a block takes several rows in turn, each with sums over its lanes and then over its warps
// (ops/rope/cuda/all_heads.cu).
CriticalPath rope_bwd_path_of_all_heads(double rows) {
  const double parts = std::min(rows, 264.0), in_turn = ceil_div(rows, parts);
  CriticalPath path{.loads = in_turn, .on_chip = in_turn * 2 * (kLaneSteps + 1)};
  for (int i = 0; i < 2; ++i) path += add_rows_path(parts);
  return path;
}

// A block has 16 rows, and its groups of lanes take up to eight neighbouring heads of q, k and v in turn. With norms of
// heads each thread then adds the parts of all groups for its columns, in two halves (ops/rope/cuda/rope.cu).
CriticalPath rope_bwd_path(const TimeContext& c, double rows) {
  const ModelSpec& m = c.spec.model;
  if (m.is_latent()) return {};
  if (m.qk_norm == QkNorm::whole && norms_in_rope(m, c.spec.mesh.tp)) return rope_bwd_path_of_all_heads(rows);
  constexpr double kHeads = 8, kThreads = 256, kPairs = 8;
  const double tp = static_cast<double>(c.spec.mesh.tp), heads = static_cast<double>(m.num_heads) / tp,
               kv_heads = std::max(1.0, static_cast<double>(m.num_kv_heads) / tp);
  CriticalPath path{.loads = std::min(kHeads, heads) + 2 * std::min(kHeads, kv_heads)};
  if (m.qk_norm != QkNorm::per_head) return path;
  const double lanes = std::max(1.0, ceil_div(static_cast<double>(m.head_dim) / 2, kPairs));
  path.on_chip = 2 * 2 * kThreads / lanes;
  for (int i = 0; i < 2; ++i) path += add_rows_path(std::min(ceil_div(rows, 16), 1056.0));
  return path;
}

// A warp takes 8 of a block's 64 tokens in turn: the row of logits, a softmax, K choices and their weights. One block
// then scans the counts of all blocks in 32 parts, and blocks of tokens place their pairs
// (ops/routing/cuda/route.cu).
CriticalPath route_path(double tokens, double top_k) {
  constexpr double kTokens = 64, kTokensOfWarp = 8, kParts = 32, kAtOnce = 8;
  const double scanned = ceil_div(ceil_div(tokens, kTokens), kParts);
  return {.loads = kTokensOfWarp * 2 + 2 * ceil_div(scanned, kAtOnce) + 3,
          .on_chip = kTokensOfWarp * (2 + top_k) * kLaneSteps + kParts + 2 * kLaneSteps};
}

// A warp takes 4 of a chunk's 32 tokens in turn: a softmax, its entropy and K choices. A thread of each expert then
// adds the tokens, four loads at a time, and one adds two figures of each. The second kernel adds the chunks in 32
// parts (ops/routing/cuda/balance.cu).
CriticalPath balance_path(double tokens, double top_k) {
  constexpr double kTokens = 32, kTokensOfWarp = 4, kParts = 32, kAtOnce = 8, kUnrolled = 4, kLanes = 32;
  const double chunks = ceil_div(tokens, kTokens);
  return {.loads = kTokensOfWarp + kTokens / kUnrolled + ceil_div(chunks, kParts * kAtOnce) + ceil_div(chunks, kLanes),
          .on_chip = kTokensOfWarp * (3 + top_k) * kLaneSteps + 2 * kTokens + kParts + kLaneSteps};
}

// One block sorts the tokens by digits of 6 bits: its 32 warps read their parts twice, four loads at a time, and the
// counts of 32 warps and of 64 digits are added in turn. Then a block adds the tokens of a row of the embedding, 16
// at a time. A rank of tp has a part of the rows, and a digit for the tokens of others (ops/vocab/cuda/embedding.cu).
CriticalPath embedding_bwd_path(double tokens, double vocab, double tp) {
  constexpr double kDigitBits = 6, kWarps = 32, kLoads = 4, kLanes = 32, kDigits = 64, kAtOnce = 16;
  const double passes = std::max(1.0, std::ceil(std::log2(ceil_div(vocab, tp) + (tp > 1 ? 1 : 0)) / kDigitBits));
  const double rounds = ceil_div(tokens, kWarps * kLanes * kLoads);
  return {.loads = passes * 2 * rounds + ceil_div(tokens, vocab * kAtOnce),
          .on_chip = passes * (2 * rounds * kLoads * 3 + 2 * kWarps + 2 * kDigits)};
}

// After the products of its last tile, of 128 rows and 256 columns, a warp takes the tile's boxes of 32 columns in
// turn: gate and up arrive, and each of two results leaves before its buffer is used again
// (ops/experts/sm90/d_gated_rows.h).
CriticalPath gated_gradient_path(const OpWork& op, double rows, double hidden) {
  constexpr double kColumns = 256, kOfBox = 32, kCopies = 3;
  const double columns = op.cost.flops / static_cast<double>(op.calls) / (2 * rows * hidden);
  return {.loads = std::ceil(std::min(columns, kColumns) / kOfBox) * kCopies};
}

// Returns whether Hopper's kernels compute the experts and gated layers.
bool has_hopper_tiles(const TimeContext& c) {
  return c.spec.kernels != KernelChoice::portable && c.machine.has_hopper_kernels() &&
         c.spec.precision.compute == DType::bf16;
}

}  // namespace

double CriticalPath::seconds() const { return loads * kLoadSeconds + on_chip * kOnChipSeconds; }

CriticalPath& CriticalPath::operator+=(const CriticalPath& o) {
  loads += o.loads;
  on_chip += o.on_chip;
  return *this;
}

CriticalPath critical_path(const TimeContext& c, const OpWork& op) {
  if (!c.machine.is_gpu || c.assume.system != PlanSystem::moebius) return {};
  const ModelSpec& m = c.spec.model;
  const auto rows = static_cast<double>(rows_between_projections(c.spec.shape, c.spec.mesh));
  const auto gathered = static_cast<double>(c.spec.shape.tokens());
  const auto top_k = static_cast<double>(m.top_k);
  if (op.name == "rms_norm_bwd") return norm_bwd_path(rows, width_of_norm(op, rows));
  if (op.name == "rope_bwd") return rope_bwd_path(c, gathered);
  if (op.name == "route_fwd") return route_path(rows, top_k);
  if (op.name == "balance_stats") return balance_path(rows, top_k);
  if ((op.name == "d_expert_down" || op.name == "d_gated_down") && has_hopper_tiles(c))
    return gated_gradient_path(op, op.name == "d_expert_down" ? rows * top_k : rows,
                               static_cast<double>(m.hidden_size));
  if (op.name == "embedding_bwd")
    return embedding_bwd_path(gathered, static_cast<double>(m.vocab_size), static_cast<double>(c.spec.mesh.tp));
  return {};
}

CriticalPath norm_path(double tensors) { return {.loads = 2 * tensors, .on_chip = tensors * (2 * kLaneSteps + 3)}; }

}  // namespace moebius
