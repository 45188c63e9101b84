#include "ops/qk_norm/qk_norm.h"

#include <algorithm>

#include "ops/norm/norm.h"
#include "ops/qk_norm/qk_norm_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const char* who, const Tensor& y, const Tensor& x, const Tensor& q_norm, const Tensor& k_norm) {
  const DType dtype = x.dtype;
  MOEBIUS_CHECK(usage, (dtype == DType::f32 || dtype == DType::bf16) && x.shape.rank() == 2,
                "{}: x must be f32 or bf16 [T, A + 2 B]; got {}", who, to_string(x));
  MOEBIUS_CHECK(usage, q_norm.numel() > 0 && k_norm.numel() > 0,
                "{}: q_norm and k_norm must have elements; got {} and {}", who, to_string(q_norm), to_string(k_norm));
  check_tensor(who, "q_norm", q_norm, dtype, {q_norm.numel()});
  check_tensor(who, "k_norm", k_norm, dtype, {k_norm.numel()});
  const Shape TC{x.dim(0), q_norm.numel() + 2 * k_norm.numel()};
  check_tensor(who, "x", x, dtype, TC);
  check_tensor(who, "y", y, dtype, TC);
}

}  // namespace

void qk_norm_fwd(Stream& s, const QkNormFwd& a) {
  check("qk_norm_fwd", a.y_TC, a.x_TC, a.q_norm_A, a.k_norm_B);
  OpScope scope(s, "qk_norm_fwd", cost(a));
  if (a.x_TC.empty()) return;
  run_on_device(s, cpu::qk_norm_fwd, cuda::qk_norm_fwd, a);
}

Cost cost(const QkNormFwd& a) {
  return {4.0 * a.x_TC.dim(0) * (a.q_norm_A.numel() + a.k_norm_B.numel()), 2.0 * a.x_TC.num_bytes()};
}

int64_t QkNormBwd::num_partials(int64_t num_rows, int64_t A, int64_t B, const Stream& s) {
  return RmsNormBwd::num_partials(num_rows, std::max(A, B), s);
}

void qk_norm_bwd(Stream& s, const QkNormBwd& a) {
  const char* who = "qk_norm_bwd";
  check(who, a.dy_TC, a.x_TC, a.q_norm_A, a.k_norm_B);
  const int64_t A = a.q_norm_A.numel(), B = a.k_norm_B.numel();
  check_tensor(who, "dx", a.dx_TC, a.x_TC.dtype, a.x_TC.shape);
  check_tensor(who, "dq_norm", a.dq_norm_A, DType::f32, {A});
  check_tensor(who, "dk_norm", a.dk_norm_B, DType::f32, {B});
  check_tensor(who, "partial", a.partial_PW, DType::f32, {QkNormBwd::num_partials(a.x_TC.dim(0), A, B, s), A + B});
  OpScope scope(s, who, cost(a));
  if (a.x_TC.empty()) return;
  run_on_device(s, cpu::qk_norm_bwd, cuda::qk_norm_bwd, a);
}

Cost cost(const QkNormBwd& a) {
  return {10.0 * a.x_TC.dim(0) * (a.q_norm_A.numel() + a.k_norm_B.numel()), 3.0 * a.x_TC.num_bytes()};
}

}  // namespace moebius
