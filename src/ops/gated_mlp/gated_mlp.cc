#include "ops/gated_mlp/gated_mlp.h"

#include "ops/gated_mlp/gated_mlp_backends.h"
#include "ops/grouped_gemm/block_scaled.h"
#include "ops/op_checks.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

// The operands of a product, plain or quantised: x [T, D], and w of the given shape, which a quantised product
// may read transposed.
struct Operands {
  const char* x_name;
  const Operand &x, &w;
  Shape w_shape;
  bool w_transposed;
};

// result: a tensor of the inner width, whose columns on a GPU are a multiple of this.
struct Inner {
  const char* name;
  const Tensor& result;
  int64_t columns;
  TensorElements per_tensor;  // elements of x with such scales
};

void check_operands(const Stream& s, const char* who, const Operands& o, const Inner& inner) {
  const DType dtype = inner.result.dtype;
  if (check_both_quantised(who, o.x_name, o.x, "w", o.w)) {
    check_quantised(who, o.x_name, o.x, o.x.data.shape, /*transposed=*/false);
    check_quantised(who, "w", o.w, o.w_shape, o.w_transposed);
    if (s.target() != DeviceKind::cuda) return;
    check_block_scaled(who, {o.x_name, o.x, "w", o.w, inner.per_tensor});
    return check_block_scaled_result(who, inner.name, inner.result, inner.columns);
  }
  check_matrix(who, o.x_name, o.x.data);
  check_tensor(who, o.x_name, o.x.data, dtype, o.x.data.shape);
  check_tensor(who, "w", o.w.data, dtype, o.w_shape);
}

}  // namespace

void gated_up(Stream& s, const GatedUp& a) {
  constexpr const char* who = "gated_up";
  check_matrix(who, "a", a.a_TF);
  const DType dtype = a.a_TF.dtype;
  const int64_t T = a.x_TD.data.dim(0), D = a.x_TD.data.dim(1), F = a.a_TF.dim(1);
  check_tensor(who, "a", a.a_TF, dtype, {T, F});
  check_tensor(who, "h", a.h_T2F, dtype, {T, 2 * F});
  check_operands(s, who, {"x", a.x_TD, a.w_2FD, {2 * F, D}, false},
                 {"a", a.a_TF, gated_columns(a.x_TD.layout), TensorElements::e4m3});
  OpScope scope(s, who, cost(a));
  if (a.a_TF.empty()) return;
  run_on_device(s, cpu::gated_up, cuda::gated_up, a);
}

Cost cost(const GatedUp& a) {
  return {2.0 * static_cast<double>(a.h_T2F.numel() * a.x_TD.data.dim(1)),
          bytes_of(a.x_TD.data) + bytes_of(a.w_2FD.data) + bytes_of(a.h_T2F) + bytes_of(a.a_TF)};
}

void d_gated_down(Stream& s, const DGatedDown& a) {
  constexpr const char* who = "d_gated_down";
  check_matrix(who, "a", a.a_TF);
  const DType dtype = a.a_TF.dtype;
  const int64_t T = a.dy_TD.data.dim(0), D = a.dy_TD.data.dim(1), F = a.a_TF.dim(1);
  check_tensor(who, "a", a.a_TF, dtype, {T, F});
  check_tensor(who, "da", a.da_TF, dtype, {T, F});
  check_tensor(who, "dh", a.dh_T2F, dtype, {T, 2 * F});
  check_tensor(who, "h", a.h_T2F, dtype, {T, 2 * F});
  check_operands(s, who, {"dy", a.dy_TD, a.w_DF, {D, F}, true},
                 {"a", a.a_TF, kBlockScaledColumns, TensorElements::e5m2});
  OpScope scope(s, who, cost(a));
  if (a.a_TF.empty()) return;
  run_on_device(s, cpu::d_gated_down, cuda::d_gated_down, a);
}

Cost cost(const DGatedDown& a) {
  return {2.0 * static_cast<double>(a.a_TF.numel() * a.dy_TD.data.dim(1)),
          bytes_of(a.dy_TD.data) + bytes_of(a.w_DF.data) + bytes_of(a.h_T2F) + bytes_of(a.dh_T2F) + bytes_of(a.a_TF)};
}

}  // namespace moebius
