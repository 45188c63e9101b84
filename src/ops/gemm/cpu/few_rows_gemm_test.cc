#include "ops/gemm/cpu/few_rows_gemm.h"

#include <array>

#include "ops/cpu/testing.h"
#include "ops/gemm/gemm_ref.h"

namespace moebius::cpu {
namespace {

using testing::Array;

using Bytes = std::vector<unsigned char>;

class FewRowsGemm : public ::testing::Test {
 protected:
  Bytes product(Tensor x, Tensor w, DType c_dtype) {
    Array c = Array::poisoned({x.dim(0), w.dim(0)}, c_dtype);
    few_rows_gemm(s_, {.c_MN = c.tensor(), .a = x, .b = w, .trans_b = true});
    return c.bytes();
  }
  ThreadPool pool_{2};
  Stream s_{DeviceKind::cpu, pool_, nullptr};
};

// The rows of c, computed together and a few at a time, are the same bits. gemm_test.cc compares them
// with the reference.
TEST_F(FewRowsGemm, ARowDependsOnNoOther) {
  for (const auto& [n, k] : std::vector<std::array<int64_t, 2>>{{1, 1}, {33, 17}, {64, 70}, {7, 300}, {270, 2049}}) {
    for (const auto& [dtype, c_dtype] : std::vector<std::array<DType, 2>>{
             {DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
      Array x = Array::normal({kFewRows, k}, dtype, 1), w = Array::normal({n, k}, dtype, 2);
      const Bytes all = product(x.tensor(), w.tensor(), c_dtype);
      const int64_t row = n * size_of(c_dtype);
      for (const int64_t count : {1, 2, 3, 4, 5, 7, 13, 18, 31}) {
        for (int64_t begin = 0; begin + count <= kFewRows; begin += 5) {
          const Bytes part(all.begin() + begin * row, all.begin() + (begin + count) * row);
          EXPECT_EQ(product(x.tensor().rows(begin, begin + count), w.tensor(), c_dtype), part) << count << " " << n;
        }
      }
    }
  }
}

// Every number of rows, with columns that do not fill a kernel.
TEST_F(FewRowsGemm, EqualsTheReference) {
  for (int64_t m = 1; m <= kFewRows; ++m) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const int64_t n = 21, k = 77;
      Array x = Array::normal({m, k}, dtype, 1), w = Array::normal({n, k}, dtype, 2),
            c = Array::normal({m, n}, DType::f32, 3);
      testing::Values want = c.values();
      ref::gemm(
          {.c = want, .a = x.values(), .b = w.values(), .m = m, .n = n, .k = k, .trans_b = true, .accumulate = true});
      few_rows_gemm(s_, {.c_MN = c.tensor(), .a = x.tensor(), .b = w.tensor(), .trans_b = true, .accumulate = true});
      // A sum of k unit products has magnitude sqrt(k), and each addition errs by eps of it.
      testing::expect_close(fmt::format("{} rows", m), c.values(), want, testing::epsilon(DType::f32),
                            testing::epsilon(DType::f32) * (k + 1.0));
    }
  }
}

}  // namespace
}  // namespace moebius::cpu
