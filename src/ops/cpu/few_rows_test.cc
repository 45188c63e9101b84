#include "ops/cpu/few_rows.h"

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "ops/cpu/testing.h"
#include "ops/gemm/gemm_ref.h"

namespace moebius::cpu {
namespace {

using testing::Array;
using testing::Values;

// Tests each kind of instructions that this CPU has, also those that it would not choose.
class FewRowsTest : public ::testing::TestWithParam<FewRowsMath> {
 protected:
  void SetUp() override {
    if (!has_few_rows_math(GetParam(), DType::bf16)) GTEST_SKIP() << "this CPU does not have the instructions";
  }

  // Returns the products of rows [first, first + num) of x with the first n rows of w. Writes them into a larger tile,
  // and expects that nothing around them changes.
  static std::vector<float> product(Tensor x, int64_t first, int64_t num, Tensor w, int64_t n) {
    constexpr int64_t kPad = 3;
    const int64_t k = x.dim(1), ld = n + kPad;
    const FewRowsMath math = x.dtype == DType::bf16 ? GetParam() : FewRowsMath::lanes;
    std::vector<char> packed(packed_bytes(x.dtype, num, k, math));
    std::vector<const void*> row;
    for (int64_t i = first; i < first + num; ++i) row.push_back(x.rows(i, i + 1).data);
    const FewRows rows = pack_few_rows(x.dtype, packed.data(), row.data(), num, k, math);
    std::vector<float> tile((num + 1) * ld, -7.0f), sums;
    if (x.dtype == DType::bf16)
      multiply_few_rows(tile.data(), ld, rows, w.ptr<bf16>(), n, w.dim(0) - n);
    else
      multiply_few_rows(tile.data(), ld, rows, w.ptr<float>(), n, w.dim(0) - n);
    for (int64_t i = 0; i < std::ssize(tile); ++i) {
      if (i < num * ld && i % ld < n)
        sums.push_back(tile[i]);
      else
        EXPECT_EQ(tile[i], -7.0f) << i;
    }
    return sums;
  }
};

constexpr int64_t kShapes[][2] = {{1, 1},  {5, 31},  {16, 32},  {17, 33},  {31, 96},
                                  {32, 7}, {33, 64}, {48, 127}, {70, 130}, {64, 1030}};

// Rows of w that are not multiplied hold NaN. So do the elements after the last row that the others could read.
TEST_P(FewRowsTest, EqualsTheReference) {
  for (const auto& [n, k] : kShapes) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Array x = Array::normal({kMaxFewRows, k}, dtype, 1);
      Values known = Array::normal({n, k}, dtype, 2).values(), with_nan = known;
      with_nan.resize((n + 40) * k, std::numeric_limits<double>::quiet_NaN());
      Array w = Array::of({n + 40, k}, dtype, with_nan);
      Values want;
      ref::gemm({.c = want, .a = x.values(), .b = known, .m = kMaxFewRows, .n = n, .k = k, .trans_b = true});
      for (const int64_t num : {1, 2, 3, 4, 5, 11, 16, 17, 22, 31, 32}) {
        const std::vector<float> got = product(x.tensor(), 0, num, w.tensor(), n);
        // A sum of k unit products has magnitude sqrt(k), and each addition errs by eps of it.
        testing::expect_close(fmt::format("{} rows, {} x {}", num, n, k), Values(got.begin(), got.end()),
                              Values(want.begin(), want.begin() + num * n), testing::epsilon(DType::f32),
                              testing::epsilon(DType::f32) * (k + 1.0));
      }
    }
  }
}

// The text of a prompt does not depend on the texts that are generated with it.
TEST_P(FewRowsTest, ARowDependsOnNoOther) {
  for (const auto& [n, k] : kShapes) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Array x = Array::normal({kMaxFewRows, k}, dtype, 1), w = Array::normal({n, k}, dtype, 2);
      const std::vector<float> all = product(x.tensor(), 0, kMaxFewRows, w.tensor(), n);
      for (const int64_t num : {1, 2, 7, 16, 17, 25}) {
        for (int64_t first = 0; first + num <= kMaxFewRows; first += 5) {
          const std::vector<float> part(all.begin() + first * n, all.begin() + (first + num) * n);
          EXPECT_EQ(product(x.tensor(), first, num, w.tensor(), n), part) << num << " rows, " << n << " x " << k;
        }
      }
    }
  }
}

std::string name_of_math(const ::testing::TestParamInfo<FewRowsMath>& math) {
  return std::array{"lanes", "pairs", "tiles"}[static_cast<size_t>(math.param)];
}
INSTANTIATE_TEST_SUITE_P(Instructions, FewRowsTest,
                         ::testing::Values(FewRowsMath::lanes, FewRowsMath::pairs, FewRowsMath::tiles), name_of_math);

}  // namespace
}  // namespace moebius::cpu
