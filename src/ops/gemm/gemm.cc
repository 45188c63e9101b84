#include "ops/gemm/gemm.h"

#include "ops/elementwise/elementwise_backends.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/gemm/gemm_device.h"
#include "ops/grouped_gemm/block_scaled.h"

namespace moebius {
namespace {

struct Sizes {
  int64_t m, n, k;
};

Sizes sizes_of(const Gemm& a) {
  const Shape x = a.a.shape(), y = a.b.shape();
  return {x[a.trans_a ? 1 : 0], y[a.trans_b ? 0 : 1], x[a.trans_a ? 0 : 1]};
}

void check_matrices(const Gemm& a) {
  MOEBIUS_CHECK(usage, a.a.data.shape.rank() == 2 && a.b.data.shape.rank() == 2,
                "gemm: a and b must be matrices; got {} and {}", to_string(a.a), to_string(a.b));
}

void check_quantised_product(const Gemm& a) {
  check_matrices(a);
  const auto [m, n, k] = sizes_of(a);
  check_quantised("gemm", "a", a.a, a.trans_a ? Shape{k, m} : Shape{m, k}, a.trans_a);
  check_quantised("gemm", "b", a.b, a.trans_b ? Shape{n, k} : Shape{k, n}, !a.trans_b);
  check_tensor("gemm", "c", a.c_MN, a.c_MN.dtype == DType::bf16 ? DType::bf16 : DType::f32, {m, n});
}

// Checks that the product is one of y = x W^T, dx = dy W and dW += dy^T x.
void check_for_gpu(const Gemm& a) {
  check_block_scaled("gemm", {"a", a.a, "b", a.b, a.trans_a ? TensorElements::e5m2 : TensorElements::both});
  if (!a.trans_a) return check_block_scaled_result("gemm", "c", a.c_MN);
  MOEBIUS_CHECK(
      usage, !a.trans_b && a.c_MN.dtype == DType::f32 && a.c_MN.dim(1) % 4 == 0,
      "gemm on a GPU: c of a quantised product with a transposed must be f32 with a multiple of 4 columns, and "
      "b not transposed; got {}",
      to_string(a.c_MN));
}

void check_bias(const Gemm& a) {
  if (a.bias_N.empty()) return;
  MOEBIUS_CHECK(usage, !a.accumulate, "gemm: a bias excludes accumulate; add the bias in the call that sets c");
  check_tensor("gemm", "bias", a.bias_N, a.c_MN.dtype, {a.c_MN.dim(1)});
}

void check(const Gemm& a, const Stream& s) {
  if (check_both_quantised("gemm", "a", a.a, "b", a.b)) {
    check_quantised_product(a);
    if (s.target() == DeviceKind::cuda) check_for_gpu(a);
    return;
  }
  const DType dtype = a.a.data.dtype;
  MOEBIUS_CHECK(usage, dtype == DType::f32 || dtype == DType::bf16, "gemm: a must be f32 or bf16; got {}",
                to_string(a.a.data));
  check_matrices(a);
  const auto [m, n, k] = sizes_of(a);
  check_tensor("gemm", "a", a.a.data, dtype, a.trans_a ? Shape{k, m} : Shape{m, k});
  check_tensor("gemm", "b", a.b.data, dtype, a.trans_b ? Shape{n, k} : Shape{k, n});
  check_tensor("gemm", "c", a.c_MN, a.c_MN.dtype == DType::f32 ? DType::f32 : dtype, {m, n});
}

}  // namespace

void gemm(Stream& s, const Gemm& a) {
  check(a, s);
  check_bias(a);
  OpScope scope(s, "gemm", cost(a));
  if (a.c_MN.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      cpu::gemm(s, a);
      if (!a.bias_N.empty()) cpu::add_row(s, a.c_MN, a.bias_N.view({1, a.bias_N.dim(0)}));
      return;
    case DeviceKind::cuda:
      return cuda::gemm(s, a);
    case DeviceKind::null:
      return;
  }
}

void prepare_gemm(Stream& s) {
  if (s.device() == DeviceKind::cuda) cuda::prepare_gemm(s);
}

std::string gemm_algorithm_text(Stream& s, const Gemm& a) {
  return s.device() == DeviceKind::cuda ? cuda::gemm_algorithm_text(s, a) : "";
}

Cost cost(const Gemm& a) {
  const auto [m, n, k] = sizes_of(a);
  const double c_bytes = static_cast<double>(a.c_MN.num_bytes()) * (a.accumulate ? 2 : 1);
  return {2.0 * m * n * k, static_cast<double>(a.a.data.num_bytes() + a.b.data.num_bytes()) + c_bytes};
}

}  // namespace moebius
