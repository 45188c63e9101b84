#include "ops/gemm/cpu/few_rows_gemm.h"

#include <array>
#include <cstring>

#include "ops/cpu/testing.h"
#include "ops/gemm/gemm_ref.h"

namespace moebius::cpu {
namespace {

using testing::Array;

// The rows of c, computed together and one by one, are the same bits. gemm_test.cc compares them with
// the reference.
TEST(FewRowsGemm, ARowDependsOnNoOther) {
  for (const auto& [n, k] : std::vector<std::array<int64_t, 2>>{{1, 1}, {33, 17}, {64, 70}, {7, 300}, {270, 2049}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const DType c_dtype : {DType::f32, dtype}) {
        const Array x = Array::random({kFewRows, k}, 1, dtype), w = Array::random({n, k}, 2, dtype);
        const auto product = [&](int64_t begin, int64_t end, bool accumulate) {
          Array c = Array::random({end - begin, n}, 3, c_dtype);
          if (end - begin == 1) std::memset(c.tensor().data, 0, c.tensor().num_bytes());
          if (end - begin > 1 && !accumulate) std::memset(c.tensor().data, 0xff, c.tensor().num_bytes());
          ThreadPool pool(2);
          Stream s(DeviceKind::cpu, pool, nullptr);
          few_rows_gemm(s, {.c_MN = c.tensor(), .a = x.tensor().rows(begin, end), .b = w.tensor(), .trans_b = true});
          return std::string(static_cast<const char*>(c.tensor().data), c.tensor().num_bytes());
        };
        const std::string all = product(0, kFewRows, false);
        const size_t row = all.size() / kFewRows;
        for (const int64_t count : {1, 2, 5, 6, 7, 31})
          for (int64_t begin = 0; begin + count <= kFewRows; begin += 5)
            EXPECT_EQ(product(begin, begin + count, false), all.substr(begin * row, count * row)) << count << " " << n;
      }
    }
  }
}

}  // namespace
}  // namespace moebius::cpu
