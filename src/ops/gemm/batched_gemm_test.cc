#include "ops/gemm/batched_gemm.h"

#include "ops/cpu/testing.h"
#include "ops/gemm/gemm_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t B, m, n, k;
  DType dtype = DType::f32, c_dtype = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [dtype, c_dtype] :
       {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
    for (const auto& [B, m, n, k] : std::vector<std::array<int64_t, 4>>{
             {0, 3, 4, 5}, {2, 0, 3, 5}, {2, 3, 4, 0}, {3, 5, 3, 7}, {4, 64, 16, 32}, {3, 129, 72, 264}}) {
      all.push_back({B, m, n, k, dtype, c_dtype});
    }
  }
  return all;
}

class BatchedGemmTest : public testing::DeviceTest<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, BatchedGemmTest, ::testing::ValuesIn(testing::on_each_device(cases())));

Values part(const Values& of, int64_t i, int64_t numel) {
  return Values(of.begin() + i * numel, of.begin() + (i + 1) * numel);
}

// Each product equals the reference, and has the bits of a batch of one.
TEST_P(BatchedGemmTest, EqualsTheReferenceInAnyBatch) {
  const auto [B, m, n, k, dtype, c_dtype] = c();
  for (int mode = 0; mode < 8; ++mode) {
    const bool trans_a = mode & 1, trans_b = mode & 2, accumulate = mode & 4;
    const Shape of_a = trans_a ? Shape{B, k, m} : Shape{B, m, k}, of_b = trans_b ? Shape{B, n, k} : Shape{B, k, n};
    Array a = Array::normal(of_a, dtype, 1), b = Array::normal(of_b, dtype, 2),
          all = Array::normal({B, m, n}, c_dtype, 3);
    const Values before = all.values();
    batched_gemm(s_, {.c_BMN = all.tensor(),
                      .a = a.tensor(),
                      .b = b.tensor(),
                      .trans_a = trans_a,
                      .trans_b = trans_b,
                      .accumulate = accumulate});
    const Values got = all.values();
    for (int64_t i = 0; i < B; ++i) {
      Values want = part(before, i, m * n);
      ref::gemm({.c = want,
                 .a = part(a.values(), i, m * k),
                 .b = part(b.values(), i, k * n),
                 .m = m,
                 .n = n,
                 .k = k,
                 .trans_a = trans_a,
                 .trans_b = trans_b,
                 .accumulate = accumulate});
      const std::string what = fmt::format("mode {}, product {}", mode, i);
      const double error = testing::epsilon(DType::f32) * (static_cast<double>(k) + 1);
      testing::expect_close(what, part(got, i, m * n), want, testing::epsilon(c_dtype), error);
      Array alone = Array::of({1, m, n}, c_dtype, part(before, i, m * n));
      batched_gemm(s_, {.c_BMN = alone.tensor(),
                        .a = a.tensor().rows(i, i + 1),
                        .b = b.tensor().rows(i, i + 1),
                        .trans_a = trans_a,
                        .trans_b = trans_b,
                        .accumulate = accumulate});
      EXPECT_EQ(alone.values(), part(got, i, m * n)) << what;
    }
  }
}

TEST(BatchedGemm, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array a({2, 3, 4}, DType::f32), b({2, 4, 5}, DType::f32), c({2, 3, 5}, DType::f32), flat({3, 4}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { batched_gemm(s, {.c_BMN = c.tensor(), .a = b.tensor(), .b = a.tensor()}); }),
            "batched_gemm: a must be f32[2, 3, 5]; got f32[2, 4, 5]");
  EXPECT_EQ(testing::error_of([&] { batched_gemm(s, {.c_BMN = c.tensor(), .a = flat.tensor(), .b = b.tensor()}); }),
            "batched_gemm: a, b and c must be batches of matrices; got f32[3, 4], f32[2, 4, 5] and f32[2, 3, 5]");
}

TEST(BatchedGemm, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    batched_gemm(s, {.c_BMN = testing::null_tensor({7, 2, 3}),
                     .a = testing::null_tensor({7, 2, 5}),
                     .b = testing::null_tensor({7, 5, 3})});
  });
  EXPECT_EQ(cost.flops, 7 * 2 * 2 * 3 * 5);
  EXPECT_EQ(cost.bytes, 7 * 4 * (10 + 15 + 6));
}

}  // namespace
}  // namespace moebius
