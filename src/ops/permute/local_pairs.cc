#include "ops/permute/local_pairs.h"

#include <algorithm>

#include "ops/permute/permute_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

void check_matrix(const char* who, const char* name, const Tensor& t, const char* shape) {
  MOEBIUS_CHECK(usage, t.shape.rank() == 2, "{}: {} must be {}; got {}", who, name, shape, to_string(t));
}

void check(const LocalPairs& a) {
  constexpr const char* who = "local_pairs";
  check_matrix(who, "topk of all", a.topk_NK, "[N, K]");
  MOEBIUS_CHECK(usage, a.num_experts >= 1, "{}: the rank must have experts; got {}", who, a.num_experts);
  const int64_t N = a.topk_NK.dim(0), L = std::min(a.topk_NK.dim(1), a.num_experts);
  check_tensor(who, "topk of all", a.topk_NK, DType::i32, a.topk_NK.shape);
  if (!a.kept_NK.empty()) check_tensor(who, "kept", a.kept_NK, DType::i32, a.topk_NK.shape);
  check_tensor(who, "weight of all", a.weight_NK, DType::f32, a.topk_NK.shape);
  check_tensor(who, "topk", a.topk_NL, DType::i32, {N, L});
  check_tensor(who, "k", a.k_NL, DType::i32, {N, L});
  check_tensor(who, "weight", a.weight_NL, DType::f32, {N, L});
}

void check(const LocalPairsToRows& a) {
  constexpr const char* who = "local_pairs_to_rows";
  check_matrix(who, "pair_row", a.pair_row_NL, "[N, L]");
  check_tensor(who, "pair_row", a.pair_row_NL, DType::i32, a.pair_row_NL.shape);
  check_tensor(who, "from", a.from_NL, DType::f32, a.pair_row_NL.shape);
  check_tensor(who, "to", a.to_R, DType::f32, {a.to_R.numel()});
}

void check(const RowsToAllPairs& a) {
  constexpr const char* who = "rows_to_all_pairs";
  check_matrix(who, "to", a.to_NK, "[N, K]");
  check_matrix(who, "pair_row", a.pair_row_NL, "[N, L]");
  check_tensor(who, "to", a.to_NK, DType::f32, a.to_NK.shape);
  check_tensor(who, "from", a.from_R, DType::f32, {a.from_R.numel()});
  check_tensor(who, "pair_row", a.pair_row_NL, DType::i32, {a.to_NK.dim(0), a.pair_row_NL.dim(1)});
  check_tensor(who, "k", a.k_NL, DType::i32, a.pair_row_NL.shape);
}

}  // namespace

void local_pairs(Stream& s, const LocalPairs& a) {
  check(a);
  OpScope scope(s, "local_pairs", {0, 2 * bytes_of(a.topk_NK) + bytes_of(a.kept_NK) + 3 * bytes_of(a.topk_NL)});
  if (a.topk_NL.empty()) return;
  run_on_device(s, cpu::local_pairs, cuda::local_pairs, a);
}

void local_pairs_to_rows(Stream& s, const LocalPairsToRows& a) {
  check(a);
  OpScope scope(s, "local_pairs_to_rows", {0, 2 * bytes_of(a.from_NL) + bytes_of(a.to_R)});
  if (a.from_NL.empty()) return;
  run_on_device(s, cpu::local_pairs_to_rows, cuda::local_pairs_to_rows, a);
}

void rows_to_all_pairs(Stream& s, const RowsToAllPairs& a) {
  check(a);
  OpScope scope(s, "rows_to_all_pairs", {0, bytes_of(a.to_NK) + 3 * bytes_of(a.pair_row_NL)});
  if (a.to_NK.empty()) return;
  run_on_device(s, cpu::rows_to_all_pairs, cuda::rows_to_all_pairs, a);
}

}  // namespace moebius
