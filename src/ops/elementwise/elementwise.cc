#include "ops/elementwise/elementwise.h"

#include "ops/elementwise/elementwise_backends.h"
#include "ops/elementwise/fill_zeros.h"
#include "ops/op_checks.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

Cost moved(int64_t num_bytes, int64_t flops = 0) {
  return {static_cast<double>(flops), static_cast<double>(num_bytes)};
}

// Checks x [T, D] f32 or bf16, and gate f32 [T].
void check_gated(const char* who, const Tensor& x, const Tensor& gate) {
  check_float(who, "x", x);
  MOEBIUS_CHECK(usage, x.shape.rank() == 2, "{}: x must be [T, D]; got {}", who, to_string(x));
  check_tensor(who, "gate", gate, DType::f32, {x.dim(0)});
}

void check_columns(const char* name, const Tensor& x, int64_t first, int64_t count) {
  MOEBIUS_CHECK(usage, x.shape.rank() == 2 && first >= 0 && count >= 0 && first + count <= x.dim(1),
                "copy_columns: {} must be a matrix with columns [{}, {}); got {}", name, first, first + count,
                to_string(x));
}

}  // namespace

void fill_zero(Stream& s, Tensor x) {
  check_tensor("fill_zero", "x", x, x.dtype, x.shape);
  OpScope scope(s, "fill_zero", moved(x.num_bytes()));
  if (x.empty()) return;
  run_on_device(s, cpu::fill_zero, cuda::fill_zero, x);
}

void fill_zeros(Stream& s, std::span<const Tensor> x) {
  int64_t num_bytes = 0;
  for (const Tensor& each : x) {
    if (each.empty()) continue;
    check_tensor("fill_zeros", "x", each, each.dtype, each.shape);
    num_bytes += each.num_bytes();
  }
  OpScope scope(s, "fill_zero", moved(num_bytes));
  if (num_bytes == 0) return;
  run_on_device(s, cpu::fill_zeros, cuda::fill_zeros, x);
}

void copy(Stream& s, Tensor to, Tensor from) {
  check_tensor("copy", "to", to, to.dtype, from.shape);
  if (to.dtype != from.dtype) {
    check_float("copy", "to", to);
    check_float("copy", "from", from);
  }
  OpScope scope(s, "copy", moved(to.num_bytes() + from.num_bytes()));
  if (to.empty()) return;
  run_on_device(s, cpu::copy, cuda::copy, to, from);
}

void add(Stream& s, Tensor y, Tensor x) {
  check_float("add", "x", x);
  check_tensor("add", "y", y, x.dtype == DType::f32 && y.dtype == DType::bf16 ? DType::bf16 : x.dtype, x.shape);
  OpScope scope(s, "add", moved(2 * y.num_bytes() + x.num_bytes(), x.numel()));
  if (x.empty()) return;
  run_on_device(s, cpu::add, cuda::add, y, x);
}

void add_row(Stream& s, Tensor y_SD, Tensor row_1D) {
  const DType dtype = y_SD.dtype == DType::bf16 ? DType::bf16 : DType::f32;
  check_tensor("add_row", "row", row_1D, dtype, {1, y_SD.shape.rank() == 2 ? y_SD.dim(1) : 0});
  check_tensor("add_row", "y", y_SD, dtype, {y_SD.dim(0), y_SD.dim(1)});
  OpScope scope(s, "add_row", moved(2 * y_SD.num_bytes(), y_SD.numel()));
  if (y_SD.empty()) return;
  run_on_device(s, cpu::add_row, cuda::add_row, y_SD, row_1D);
}

void copy_columns(Stream& s, const CopyColumns& a) {
  check_columns("to", a.to_TA, a.to_first, a.count);
  check_columns("from", a.from_TB, a.from_first, a.count);
  check_tensor("copy_columns", "to", a.to_TA, a.from_TB.dtype, {a.from_TB.dim(0), a.to_TA.dim(1)});
  const int64_t num_bytes = a.to_TA.dim(0) * a.count * size_of(a.to_TA.dtype);
  OpScope scope(s, "copy_columns", {0, 2.0 * static_cast<double>(num_bytes)});
  if (num_bytes == 0) return;
  run_on_device(s, cpu::copy_columns, cuda::copy_columns, a);
}

int64_t SumRows::scratch_bytes(const SumRows& a) {
  return div_ceil(a.x_TC.dim(0), kRowsOfBlock) * a.x_TC.dim(1) * size_of(DType::f32);
}

void sum_rows(Stream& s, const SumRows& a) {
  const DType dtype = a.x_TC.dtype == DType::bf16 ? DType::bf16 : DType::f32;
  check_tensor("sum_rows", "x", a.x_TC, dtype, {a.x_TC.dim(0), a.x_TC.shape.rank() == 2 ? a.x_TC.dim(1) : 0});
  check_tensor("sum_rows", "sum", a.sum_C, DType::f32, {a.x_TC.dim(1)});
  check_scratch("sum_rows", a.scratch, SumRows::scratch_bytes(a));
  OpScope scope(s, "sum_rows", moved(a.x_TC.num_bytes() + a.sum_C.num_bytes(), a.x_TC.numel()));
  if (a.x_TC.empty()) return;
  run_on_device(s, cpu::sum_rows, cuda::sum_rows, a);
}

void sum_into(Stream& s, const SumInto& a) {
  check_tensor("sum_into", "out", a.out_1, DType::f64, {1});
  check_tensor("sum_into", "x", a.x, DType::f32, a.x.shape);
  OpScope scope(s, "sum_into", moved(a.x.num_bytes(), a.x.numel()));
  if (a.x.empty()) return;
  run_on_device(s, cpu::sum_into, cuda::sum_into, a);
}

void gated_add_fwd(Stream& s, const GatedAddFwd& a) {
  check_gated("gated_add_fwd", a.x_TD, a.gate_T);
  check_tensor("gated_add_fwd", "y", a.y_TD, a.x_TD.dtype, a.x_TD.shape);
  OpScope scope(s, "gated_add_fwd", moved(3 * a.x_TD.num_bytes() + a.gate_T.num_bytes(), 2 * a.x_TD.numel()));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::gated_add_fwd, cuda::gated_add_fwd, a);
}

void gated_add_bwd(Stream& s, const GatedAddBwd& a) {
  const char* who = "gated_add_bwd";
  check_gated(who, a.x_TD, a.gate_T);
  check_tensor(who, "dx", a.dx_TD, a.x_TD.dtype, a.x_TD.shape);
  check_tensor(who, "dgate", a.dgate_T, DType::f32, a.gate_T.shape);
  check_tensor(who, "dy", a.dy_TD, a.x_TD.dtype, a.x_TD.shape);
  OpScope scope(s, who, moved(3 * a.x_TD.num_bytes() + 2 * a.gate_T.num_bytes(), 3 * a.x_TD.numel()));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::gated_add_bwd, cuda::gated_add_bwd, a);
}

void jitter(Stream& s, const Jitter& a) {
  check_float("jitter", "x", a.x_TD);
  MOEBIUS_CHECK(usage, a.x_TD.shape.rank() == 2, "jitter: x must be [T, D]; got {}", to_string(a.x_TD));
  check_tensor("jitter", "y", a.y_TD, a.x_TD.dtype, a.x_TD.shape);
  check_tensor("jitter", "draw", a.draw_2, DType::i64, {2});
  OpScope scope(s, "jitter", moved(2 * a.x_TD.num_bytes(), a.x_TD.numel()));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::jitter, cuda::jitter, a);
}

void fill_normal(Stream& s, const FillNormal& a) {
  check_float("fill_normal", "x", a.x);
  OpScope scope(s, "fill_normal", moved(a.x.num_bytes()));
  if (a.x.empty()) return;
  run_on_device(s, cpu::fill_normal, cuda::fill_normal, a);
}

int64_t find_nonfinite(Stream& s, Tensor x) {
  check_float("find_nonfinite", "x", x);
  OpScope scope(s, "find_nonfinite", moved(x.num_bytes()));
  if (x.empty()) return -1;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::find_nonfinite(s, x);
    case DeviceKind::cuda:
      return cuda::find_nonfinite(s, x);
    case DeviceKind::null:
      return -1;
  }
  MOEBIUS_FAIL(internal, "find_nonfinite: unknown device {}", static_cast<int>(s.device()));
}

}  // namespace moebius
