#include "ops/gemm/batched_gemm.h"

#include "core/error.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/op_checks.h"

namespace moebius {
namespace {

// M, N and K of each product, and their number.
struct Sizes {
  int64_t count, m, n, k;
};

Sizes sizes_of(const BatchedGemm& a) {
  return {a.c_BMN.dim(0), a.c_BMN.dim(1), a.c_BMN.dim(2), a.a.dim(a.trans_a ? 1 : 2)};
}

void check(const BatchedGemm& a) {
  const char* who = "batched_gemm";
  check_float(who, "a", a.a);
  MOEBIUS_CHECK(usage, a.a.shape.rank() == 3 && a.b.shape.rank() == 3 && a.c_BMN.shape.rank() == 3,
                "{}: a, b and c must be batches of matrices; got {}, {} and {}", who, to_string(a.a), to_string(a.b),
                to_string(a.c_BMN));
  const auto [count, m, n, k] = sizes_of(a);
  check_tensor(who, "a", a.a, a.a.dtype, a.trans_a ? Shape{count, k, m} : Shape{count, m, k});
  check_tensor(who, "b", a.b, a.a.dtype, a.trans_b ? Shape{count, n, k} : Shape{count, k, n});
  check_tensor(who, "c", a.c_BMN, a.c_BMN.dtype == DType::f32 ? DType::f32 : a.a.dtype, {count, m, n});
}

Tensor matrix(const Tensor& batch, int64_t i) { return batch.rows(i, i + 1).view({batch.dim(1), batch.dim(2)}); }

}  // namespace

Gemm product_of(const BatchedGemm& a, int64_t i) {
  return {.c_MN = matrix(a.c_BMN, i),
          .a = matrix(a.a, i),
          .b = matrix(a.b, i),
          .trans_a = a.trans_a,
          .trans_b = a.trans_b,
          .accumulate = a.accumulate};
}

void batched_gemm(Stream& s, const BatchedGemm& a) {
  check(a);
  OpScope scope(s, "batched_gemm", cost(a));
  if (a.c_BMN.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      for (int64_t i = 0; i < a.c_BMN.dim(0); ++i) cpu::gemm(s, product_of(a, i));
      return;
    case DeviceKind::cuda:
      return cuda::batched_gemm(s, a);
    case DeviceKind::null:
      return;
  }
}

Cost cost(const BatchedGemm& a) {
  const auto [count, m, n, k] = sizes_of(a);
  const double c_bytes = static_cast<double>(a.c_BMN.num_bytes()) * (a.accumulate ? 2 : 1);
  return {2.0 * static_cast<double>(count) * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
          static_cast<double>(a.a.num_bytes() + a.b.num_bytes()) + c_bytes};
}

}  // namespace moebius
