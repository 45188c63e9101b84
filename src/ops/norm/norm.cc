#include "ops/norm/norm.h"

#include <algorithm>

#include "ops/norm/norm_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const RmsNormFwd& a) {
  const char* who = "rms_norm_fwd";
  const DType dtype = a.x_TD.dtype;
  MOEBIUS_CHECK(usage, (dtype == DType::f32 || dtype == DType::bf16) && a.x_TD.shape.rank() == 2,
                "{}: x must be f32 or bf16 [T, D]; got {}", who, to_string(a.x_TD));
  const int64_t rows = a.x_TD.dim(0), width = a.x_TD.dim(1);
  MOEBIUS_CHECK(usage, width > 0, "{}: x must have columns; got {}", who, to_string(a.x_TD));
  check_tensor(who, "x", a.x_TD, dtype, {rows, width});
  check_tensor(who, "y", a.y_TD, dtype, {rows, width});
  check_tensor(who, "rstd", a.rstd_T, DType::f32, {rows});
  check_tensor(who, "w", a.w_D, dtype, {width});
  if (a.residual_TD.empty()) return;
  check_tensor(who, "residual", a.residual_TD, dtype, {rows, width});
  check_tensor(who, "sum", a.sum_TD, dtype, {rows, width});
}

void check(const RmsNormBwd& a, const Stream& s) {
  const char* who = "rms_norm_bwd";
  const DType dtype = a.x_TD.dtype;
  MOEBIUS_CHECK(usage, (dtype == DType::f32 || dtype == DType::bf16) && a.x_TD.shape.rank() == 2,
                "{}: x must be f32 or bf16 [T, D]; got {}", who, to_string(a.x_TD));
  const int64_t rows = a.x_TD.dim(0), width = a.x_TD.dim(1);
  MOEBIUS_CHECK(usage, width > 0, "{}: x must have columns; got {}", who, to_string(a.x_TD));
  check_tensor(who, "x", a.x_TD, dtype, {rows, width});
  check_tensor(who, "dx", a.dx_TD, dtype, {rows, width});
  check_tensor(who, "dw", a.dw_D, DType::f32, {width});
  check_tensor(who, "partial", a.partial_PD, DType::f32, {RmsNormBwd::num_partials(rows, width, s), width});
  check_tensor(who, "dy", a.dy_TD, dtype, {rows, width});
  check_tensor(who, "rstd", a.rstd_T, DType::f32, {rows});
  check_tensor(who, "w", a.w_D, dtype, {width});
}

}  // namespace

void rms_norm_fwd(Stream& s, const RmsNormFwd& a) {
  check(a);
  OpScope scope(s, "rms_norm_fwd", cost(a));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::rms_norm_fwd, cuda::rms_norm_fwd, a);
}

// Each element costs a square, an addition and two products; with a residual one more addition.
Cost cost(const RmsNormFwd& a) {
  const bool residual = !a.residual_TD.empty();
  const int64_t bytes = a.x_TD.num_bytes() * (residual ? 4 : 2) + a.rstd_T.num_bytes() + a.w_D.num_bytes();
  return {static_cast<double>(a.x_TD.numel()) * (residual ? 5 : 4), static_cast<double>(bytes)};
}

// Chunks of a fixed size on the CPU. On a GPU a block has one: two for each of 132 multiprocessors
// and more where rows are narrow, so that enough loads are in flight; the partial sums are a few percent of the bytes
// that are read.
int64_t RmsNormBwd::num_partials(int64_t num_rows, int64_t width, const Stream& s) {
  if (s.target() != DeviceKind::cuda) return div_ceil(num_rows, 64);
  return std::min(num_rows, 264 * std::clamp<int64_t>((8192 + width / 2) / width, 1, 8));
}

void rms_norm_bwd(Stream& s, const RmsNormBwd& a) {
  check(a, s);
  OpScope scope(s, "rms_norm_bwd", cost(a));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::rms_norm_bwd, cuda::rms_norm_bwd, a);
}

Cost cost(const RmsNormBwd& a) {
  const int64_t bytes = a.x_TD.num_bytes() * 4 + a.rstd_T.num_bytes() + a.w_D.num_bytes() + a.dw_D.num_bytes() * 2;
  return {static_cast<double>(a.x_TD.numel()) * 10, static_cast<double>(bytes)};
}

}  // namespace moebius
