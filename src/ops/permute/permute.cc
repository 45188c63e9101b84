#include "ops/permute/permute.h"

#include "ops/permute/permute_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const Combine& a) {
  const auto is_float = [](DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; };
  const DType dtype = a.out_TD.dtype;
  MOEBIUS_CHECK(usage, is_float(dtype) && a.out_TD.shape.rank() == 2, "combine: out must be f32 or bf16 [T, D]; got {}",
                to_string(a.out_TD));
  MOEBIUS_CHECK(usage, a.y_RD.shape.rank() == 2 && a.pair_row_TK.shape.rank() == 2,
                "combine: y must be [R, D] and pair_row [T, K]; got {} and {}", to_string(a.y_RD),
                to_string(a.pair_row_TK));
  check_tensor("combine", "out", a.out_TD, dtype, {a.pair_row_TK.dim(0), a.y_RD.dim(1)});
  check_tensor("combine", "y", a.y_RD, is_float(a.y_RD.dtype) ? a.y_RD.dtype : dtype, a.y_RD.shape);
  check_tensor("combine", "pair_row", a.pair_row_TK, DType::i32, a.pair_row_TK.shape);
  if (!a.weight_TK.empty()) check_tensor("combine", "weight", a.weight_TK, DType::f32, a.pair_row_TK.shape);
}

void check(const PairsToRows& a) {
  check_tensor("pairs_to_rows", "to", a.to_R, DType::f32, {a.to_R.numel()});
  check_tensor("pairs_to_rows", "from", a.from_TK, DType::f32, a.from_TK.shape);
  check_tensor("pairs_to_rows", "row_pair", a.row_pair_R, DType::i32, a.to_R.shape);
  MOEBIUS_CHECK(usage, !a.offsets_E1.empty(), "pairs_to_rows: offsets must be i32 [E + 1]; got {}",
                to_string(a.offsets_E1));
  check_tensor("pairs_to_rows", "offsets", a.offsets_E1, DType::i32, {a.offsets_E1.numel()});
}

void check(const GatherRows& a) {
  MOEBIUS_CHECK(usage, a.to_RD.shape.rank() == 2 && a.from_ND.shape.rank() == 2,
                "gather_rows: to must be [R, D] and from [N, D]; got {} and {}", to_string(a.to_RD),
                to_string(a.from_ND));
  check_tensor("gather_rows", "to", a.to_RD, a.from_ND.dtype, {a.to_RD.dim(0), a.from_ND.dim(1)});
  check_tensor("gather_rows", "from", a.from_ND, a.from_ND.dtype, a.from_ND.shape);
  check_tensor("gather_rows", "row", a.row_R, DType::i32, {a.to_RD.dim(0)});
  MOEBIUS_CHECK(usage, !a.offsets_E1.empty(), "gather_rows: offsets must be i32 [E + 1]; got {}",
                to_string(a.offsets_E1));
  check_tensor("gather_rows", "offsets", a.offsets_E1, DType::i32, {a.offsets_E1.numel()});
}

void check(const RowsToPairs& a) {
  check_tensor("rows_to_pairs", "to", a.to_TK, DType::f32, a.to_TK.shape);
  check_tensor("rows_to_pairs", "from", a.from_R, DType::f32, a.from_R.shape);
  check_tensor("rows_to_pairs", "pair_row", a.pair_row_TK, DType::i32, a.to_TK.shape);
}

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

}  // namespace

void combine(Stream& s, const Combine& a) {
  check(a);
  OpScope scope(s, "combine", cost(a));
  if (a.out_TD.empty()) return;
  run_on_device(s, cpu::combine, cuda::combine, a);
}

Cost cost(const Combine& a) {
  const double pairs = static_cast<double>(a.expected_pairs > 0 ? a.expected_pairs : a.pair_row_TK.numel());
  const double row_bytes = static_cast<double>(a.y_RD.dim(1) * size_of(a.y_RD.dtype));
  return {2 * pairs * a.out_TD.dim(1), bytes_of(a.out_TD) * (a.accumulate ? 2 : 1) + pairs * row_bytes +
                                           bytes_of(a.pair_row_TK) + bytes_of(a.weight_TK)};
}

Cost cost(const GatherRows& a) {
  const double rows = static_cast<double>(a.expected_rows > 0 ? a.expected_rows : a.to_RD.dim(0));
  const double row_bytes = static_cast<double>(a.to_RD.dim(1) * size_of(a.to_RD.dtype));
  return {0, 2 * rows * row_bytes + bytes_of(a.row_R)};
}

void pairs_to_rows(Stream& s, const PairsToRows& a) {
  check(a);
  OpScope scope(s, "pairs_to_rows", {0, 2 * bytes_of(a.to_R) + bytes_of(a.row_pair_R)});
  if (a.to_R.empty()) return;
  run_on_device(s, cpu::pairs_to_rows, cuda::pairs_to_rows, a);
}

void gather_rows(Stream& s, const GatherRows& a) {
  check(a);
  OpScope scope(s, "gather_rows", cost(a));
  if (a.to_RD.empty()) return;
  run_on_device(s, cpu::gather_rows, cuda::gather_rows, a);
}

void rows_to_pairs(Stream& s, const RowsToPairs& a) {
  check(a);
  OpScope scope(s, "rows_to_pairs", {0, 2 * bytes_of(a.to_TK) + bytes_of(a.pair_row_TK)});
  if (a.to_TK.empty()) return;
  run_on_device(s, cpu::rows_to_pairs, cuda::rows_to_pairs, a);
}

}  // namespace moebius
