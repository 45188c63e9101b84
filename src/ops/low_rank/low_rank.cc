#include "ops/low_rank/low_rank.h"

#include "ops/low_rank/low_rank_backends.h"
#include "ops/low_rank/low_rank_wgrad_tiles.h"
#include "ops/op_checks.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }
double count_of(const Tensor& t) { return static_cast<double>(t.numel()); }

void check_window(const char* who, const char* name, const Tensor& t, const Columns& window) {
  MOEBIUS_CHECK(usage, window.first >= 0 && window.count >= 1 && window.first + window.count <= t.dim(1),
                "{}: {} must have the columns [{}, {}); got {}", who, name, window.first, window.first + window.count,
                to_string(t));
}

// Checks one matrix, or one of each expert; `count` of its rows from `first` on are used. Returns the
// number of matrices.
int64_t check_weights(const char* who, const char* name, const Tensor& w, DType dtype, const Columns& rows,
                      int64_t columns) {
  const int rank = w.shape.rank();
  MOEBIUS_CHECK(usage, rank == 2 || rank == 3, "{}: {} must be a matrix, or one of each expert; got {}", who, name,
                to_string(w));
  MOEBIUS_CHECK(usage, rows.first >= 0 && rows.first + rows.count <= w.dim(rank - 2) && w.dim(rank - 1) == columns,
                "{}: {} must have the rows [{}, {}) and {} columns; got {}", who, name, rows.first,
                rows.first + rows.count, columns, to_string(w));
  check_tensor(who, name, w, dtype, w.shape);
  return rank == 2 ? 1 : w.dim(0);
}

void check_rows(const char* who, const Rows& rows, int64_t num_matrices, int64_t num_rows) {
  if (!rows.offsets_e1.empty() || num_matrices > 1)
    check_tensor(who, "offsets", rows.offsets_e1, DType::i32, {num_matrices + 1});
  if (!rows.token_R.empty()) check_tensor(who, "token", rows.token_R, DType::i32, {num_rows});
}

void check(const LowRankProduct& a, const Stream& s) {
  constexpr const char* who = "low_rank_product";
  check_matrix(who, "y", a.y_RM);
  check_matrix(who, "x", a.x_TK);
  check_window(who, "y", a.y_RM, a.y);
  check_window(who, "x", a.x_TK, a.x);
  const DType dtype = a.y_RM.dtype;
  const int64_t R = a.y_RM.dim(0);
  check_tensor(who, "x", a.x_TK, dtype, a.rows.token_R.empty() ? Shape{R, a.x_TK.dim(1)} : a.x_TK.shape);
  const int64_t e = check_weights(who, "w", a.w_ePQ, dtype, {a.w_first, a.transposed ? a.x.count : a.y.count},
                                  a.transposed ? a.y.count : a.x.count);
  check_rows(who, a.rows, e, R);
  check_scratch(who, a.scratch, LowRankProduct::scratch_bytes(a, s));
}

int64_t num_rows_of(const LowRankWgrad& a) { return a.gather_left ? a.right_RN.dim(0) : a.left_RM.dim(0); }

void check(const LowRankWgrad& a, const Stream& s) {
  constexpr const char* who = "low_rank_wgrad";
  check_matrix(who, "left", a.left_RM);
  check_matrix(who, "right", a.right_RN);
  check_window(who, "left", a.left_RM, a.left);
  check_window(who, "right", a.right_RN, a.right);
  const int64_t R = num_rows_of(a);
  check_tensor(who, "right", a.right_RN, a.left_RM.dtype,
               a.gather_right ? a.right_RN.shape : Shape{R, a.right_RN.dim(1)});
  MOEBIUS_CHECK(usage, !(a.gather_left && a.gather_right), "{}: one side must not be gathered", who);
  const int64_t e = check_weights(who, "dw", a.dw_ePQ, DType::f32, {a.w_first, a.left.count}, a.right.count);
  check_rows(who, a.rows, e, R);
  MOEBIUS_CHECK(usage, !(a.gather_left || a.gather_right) || a.rows.token_R.numel() == R,
                "{}: a side is gathered, so token must be i32[{}]; got {}", who, R, to_string(a.rows.token_R));
  check_scratch(who, a.scratch, LowRankWgrad::scratch_bytes(a, s));
}

}  // namespace

void low_rank_product(Stream& s, const LowRankProduct& a) {
  check(a, s);
  OpScope scope(s, "low_rank_product", cost(a));
  if (a.y_RM.empty()) return;
  run_on_device(s, cpu::low_rank_product, cuda::low_rank_product, a);
}

Cost cost(const LowRankProduct& a) {
  const double R = static_cast<double>(a.y_RM.dim(0)), size = static_cast<double>(size_of(a.y_RM.dtype));
  return {2 * R * static_cast<double>(a.y.count * a.x.count),
          R * size * static_cast<double>(a.x.count + (a.accumulate ? 2 : 1) * a.y.count) + bytes_of(a.w_ePQ)};
}

void low_rank_wgrad(Stream& s, const LowRankWgrad& a) {
  check(a, s);
  OpScope scope(s, "low_rank_wgrad", cost(a));
  if (a.dw_ePQ.empty()) return;
  run_on_device(s, cpu::low_rank_wgrad, cuda::low_rank_wgrad, a);
}

Cost cost(const LowRankWgrad& a) {
  const double R = static_cast<double>(num_rows_of(a)), size = static_cast<double>(size_of(a.left_RM.dtype));
  return {2 * R * static_cast<double>(a.left.count * a.right.count),
          R * size * static_cast<double>(a.left.count + a.right.count) + 2 * bytes_of(a.dw_ePQ)};
}

void low_rank_block(Stream& s, const LowRankBlock& a) {
  constexpr const char* who = "low_rank_block";
  const DType dtype = a.to_eML.dtype;
  MOEBIUS_CHECK(usage, dtype == DType::f32 || dtype == DType::bf16, "{}: to must be f32 or bf16; got {}", who,
                to_string(a.to_eML));
  const int64_t e = check_weights(who, "from", a.from_ePQ, dtype, {a.row, a.count}, a.columns.count);
  check_weights(who, "to", a.to_eML, dtype, {a.first, a.count}, a.to_eML.dim(a.to_eML.shape.rank() - 1));
  MOEBIUS_CHECK(
      usage, a.to_eML.shape.rank() == a.from_ePQ.shape.rank() && (a.to_eML.shape.rank() == 2 || a.to_eML.dim(0) == e),
      "{}: to must have as many matrices as from; got {} and {}", who, to_string(a.to_eML), to_string(a.from_ePQ));
  const int64_t L = a.to_eML.dim(a.to_eML.shape.rank() - 1);
  MOEBIUS_CHECK(usage, a.columns.first >= 0 && a.columns.first + a.columns.count <= L,
                "{}: to must have the columns [{}, {}); got {}", who, a.columns.first,
                a.columns.first + a.columns.count, to_string(a.to_eML));
  OpScope scope(s, who, cost(a));
  if (a.to_eML.empty()) return;
  run_on_device(s, cpu::low_rank_block, cuda::low_rank_block, a);
}

Cost cost(const LowRankBlock& a) { return {0, 2 * bytes_of(a.from_ePQ)}; }

void low_rank_activation(Stream& s, const LowRankActivation& a) {
  constexpr const char* who = "low_rank_activation";
  check_matrix(who, "a", a.a_RF);
  check_tensor(who, "h", a.h_R2F, a.a_RF.dtype, {a.a_RF.dim(0), 2 * a.a_RF.dim(1)});
  check_tensor(who, "offsets", a.offsets_e1, DType::i32, a.offsets_e1.shape);
  OpScope scope(s, who, cost(a));
  if (a.a_RF.empty()) return;
  run_on_device(s, cpu::low_rank_activation, cuda::low_rank_activation, a);
}

Cost cost(const LowRankActivation& a) { return {8 * count_of(a.a_RF), bytes_of(a.a_RF) + bytes_of(a.h_R2F)}; }

void d_low_rank_activation(Stream& s, const DLowRankActivation& a) {
  constexpr const char* who = "d_low_rank_activation";
  check_matrix(who, "g", a.g_RF);
  const int64_t R = a.g_RF.dim(0);
  check_tensor(who, "h", a.h_R2F, a.g_RF.dtype, {R, 2 * a.g_RF.dim(1)});
  check_tensor(who, "dh", a.dh_R2F, a.g_RF.dtype, a.h_R2F.shape);
  check_tensor(who, "weight", a.weight_R, DType::f32, {R});
  check_tensor(who, "dweight", a.dweight_R, DType::f32, {R});
  check_tensor(who, "offsets", a.offsets_e1, DType::i32, a.offsets_e1.shape);
  OpScope scope(s, who, cost(a));
  if (a.g_RF.empty()) return;
  run_on_device(s, cpu::d_low_rank_activation, cuda::d_low_rank_activation, a);
}

Cost cost(const DLowRankActivation& a) {
  return {20 * count_of(a.g_RF), bytes_of(a.g_RF) + bytes_of(a.h_R2F) + 2 * bytes_of(a.dh_R2F)};
}

// Returns the scratch that the device needs.
int64_t LowRankProduct::scratch_bytes(const LowRankProduct& a, const Stream& s) {
  return s.target() == DeviceKind::cuda ? 0 : cpu::scratch_bytes(a, s.pool().size());
}
int64_t LowRankWgrad::scratch_bytes(const LowRankWgrad& a, const Stream& s) {
  return s.target() == DeviceKind::cuda ? LowRankWgradTiles(a).scratch_bytes() : cpu::scratch_bytes(a, s.pool().size());
}

}  // namespace moebius
