#include "ops/qk_norm/qk_norm_blocks.h"
#include "ops/qk_norm/qk_norm_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

// The arguments that all three ops have: x [T, A + 2 B] and the weights of one dtype.
template <class Op>
void check(const char* who, const Op& a) {
  const DType dtype = a.x_TC.dtype;
  MOEBIUS_CHECK(usage, dtype == DType::f32 || dtype == DType::bf16, "{}: x must be f32 or bf16; got {}", who,
                to_string(a.x_TC));
  check_tensor(who, "q_norm", a.q_norm_A, dtype, {a.q_norm_A.numel()});
  check_tensor(who, "k_norm", a.k_norm_B, dtype, {a.k_norm_B.numel()});
  check_tensor(who, "x", a.x_TC, dtype, {a.x_TC.dim(0), a.q_norm_A.numel() + 2 * a.k_norm_B.numel()});
}

// Returns the elements of q and k.
template <class Op>
int64_t normed_elements(const Op& a) {
  return a.x_TC.dim(0) * (a.q_norm_A.numel() + a.k_norm_B.numel());
}

double bytes_of(int64_t elements, DType dtype, int passes) {
  return static_cast<double>(passes * elements * size_of(dtype));
}

}  // namespace

void qk_norm_sums(Stream& s, const QkNormSums& a) {
  const char* who = "qk_norm_sums";
  const bool with_dy = a.dy_TC.shape.rank() == 2;  // also of no rows
  check(who, a);
  check_tensor(who, "sums", a.sums_TS, DType::f32, {a.x_TC.dim(0), with_dy ? 4 : 2});
  if (with_dy) check_tensor(who, "dy", a.dy_TC, a.x_TC.dtype, a.x_TC.shape);
  OpScope scope(s, who, {2.0 * normed_elements(a), bytes_of(normed_elements(a), a.x_TC.dtype, with_dy ? 2 : 1)});
  if (a.x_TC.empty()) return;
  run_on_device(s, cpu::qk_norm_sums, cuda::qk_norm_sums, a);
}

void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a) {
  const char* who = "qk_norm_block_fwd";
  check(who, a);
  check_tensor(who, "y", a.y_TC, a.x_TC.dtype, a.x_TC.shape);
  check_tensor(who, "sums", a.sums_T2, DType::f32, {a.x_TC.dim(0), 2});
  OpScope scope(s, who, {2.0 * normed_elements(a), bytes_of(a.x_TC.numel(), a.x_TC.dtype, 2)});
  if (a.x_TC.empty()) return;
  run_on_device(s, cpu::qk_norm_block_fwd, cuda::qk_norm_block_fwd, a);
}

void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a) {
  const char* who = "qk_norm_block_bwd";
  check(who, a);
  check_tensor(who, "dx", a.dx_TC, a.x_TC.dtype, a.x_TC.shape);
  check_tensor(who, "dq_norm", a.dq_norm_A, DType::f32, a.q_norm_A.shape);
  check_tensor(who, "dk_norm", a.dk_norm_B, DType::f32, a.k_norm_B.shape);
  check_tensor(who, "sums", a.sums_T4, DType::f32, {a.x_TC.dim(0), 4});
  // The gradients of the weights read dy and x too.
  OpScope scope(s, who, {8.0 * normed_elements(a), bytes_of(normed_elements(a), a.x_TC.dtype, 5)});
  if (a.x_TC.empty()) return;
  run_on_device(s, cpu::qk_norm_block_bwd, cuda::qk_norm_block_bwd, a);
}

}  // namespace moebius
