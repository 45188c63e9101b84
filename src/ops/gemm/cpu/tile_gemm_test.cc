#include "ops/gemm/cpu/tile_gemm.h"

#include <omp.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <new>

#include "ops/cpu/testing.h"
#include "ops/gemm/cpu/dnnl_gemm.h"
#include "ops/gemm/cpu/widened_gemm.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_ref.h"

namespace moebius::cpu {
namespace {

using testing::Array;
using testing::Values;

using Backend = void (*)(const TileGemm&);

// Runs both backends on any machine, whichever of them it prefers.
class TileGemmTest : public ::testing::TestWithParam<Backend> {
 protected:
  TileGemmTest() { omp_set_num_threads(1); }
};
INSTANTIATE_TEST_SUITE_P(Backends, TileGemmTest, ::testing::Values(dnnl_gemm, widened_gemm));

Values part_of(const Values& x, int64_t ld, int64_t rows, int64_t cols) {
  Values part;
  for (int64_t i = 0; i < rows; ++i) part.insert(part.end(), x.begin() + i * ld, x.begin() + i * ld + cols);
  return part;
}

// A CPU can run the kernels that it prefers.
TEST(TileGemm, UsesInstructionsOfThisCpu) { EXPECT_TRUE(runs_widened() || onednn_multiplies(DType::bf16)); }

// Ends with code 7 if the product of a new shape throws std::bad_alloc at a limit of addresses.
[[noreturn]] void multiply_at_a_limit() {
  Array a = Array::normal({8, 8}, DType::f32, 1), c = Array::normal({8, 8}, DType::f32, 2);
  const auto product = [&](int64_t k) {
    dnnl_gemm({.c = {c.tensor().data, 8, DType::f32},
               .a = {a.tensor().data, 8, DType::f32, false},
               .b = {a.tensor().data, 8, DType::f32, false},
               .m = 8,
               .n = 8,
               .k = k});
  };
  product(8);
  rlimit none{.rlim_cur = 0, .rlim_max = RLIM_INFINITY};  // what the process has stays
  if (::setrlimit(RLIMIT_AS, &none) != 0) std::_Exit(1);
  product(8);
  try {
    for (int64_t k = 1; k < 8; ++k) product(k);
  } catch (const std::bad_alloc&) {
    std::_Exit(7);
  }
  std::_Exit(0);
}

// Sanitizers reserve terabytes of addresses and cannot run under a limit on them.
bool reserves_terabytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages;
  return pages > (int64_t{1} << 40) / 4096;
}

// oneDNN itself would end the process with SIGSEGV.
TEST(TileGemm, LackOfMemoryForCodeIsReported) {
  if (reserves_terabytes()) GTEST_SKIP() << "a sanitizer holds the address space";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(multiply_at_a_limit(), ::testing::ExitedWithCode(7), "");
}

// Leading dimensions beyond the rows; memory between the rows of c is not written.
TEST_P(TileGemmTest, EqualsTheReferenceInsideLargerMatrices) {
  constexpr int64_t kPad = 3;
  for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{
           {1, 1, 1}, {13, 33, 17}, {5, 64, 70}, {25, 16, 300}, {100, 270, 33}, {520, 31, 5}}) {
    for (int mode = 0; mode < 24; ++mode) {
      const bool trans_a = mode & 1, trans_b = mode & 2, accumulate = mode & 4;
      const DType dtype = mode < 8 ? DType::f32 : DType::bf16, c_dtype = mode < 16 ? DType::f32 : DType::bf16;
      if (GetParam() == dnnl_gemm && !onednn_multiplies(dtype)) continue;
      const int64_t a_rows = trans_a ? k : m, a_cols = trans_a ? m : k, b_rows = trans_b ? n : k,
                    b_cols = trans_b ? k : n;
      Array a = Array::normal({a_rows, a_cols + kPad}, dtype, 1), b = Array::normal({b_rows, b_cols + kPad}, dtype, 2),
            c = Array::normal({m, n + kPad}, c_dtype, 3);
      const Values old = c.values();
      Values want = part_of(old, n + kPad, m, n);
      ref::gemm({.c = want,
                 .a = part_of(a.values(), a_cols + kPad, a_rows, a_cols),
                 .b = part_of(b.values(), b_cols + kPad, b_rows, b_cols),
                 .m = m,
                 .n = n,
                 .k = k,
                 .trans_a = trans_a,
                 .trans_b = trans_b,
                 .accumulate = accumulate});
      GetParam()({.c = {c.tensor().data, n + kPad, c_dtype},
                  .a = {a.tensor().data, a_cols + kPad, dtype, trans_a},
                  .b = {b.tensor().data, b_cols + kPad, dtype, trans_b},
                  .m = m,
                  .n = n,
                  .k = k,
                  .accumulate = accumulate});
      // Sums of k unit products in f32, then one rounding.
      const double sum_error = testing::epsilon(DType::f32) * (k + 1.0);
      testing::expect_close(fmt::format("{} x {} x {} mode {}", m, n, k, mode), part_of(c.values(), n + kPad, m, n),
                            want, testing::epsilon(c_dtype), sum_error);
      const Values now = c.values();
      for (int64_t i = 0; i < m * (n + kPad); ++i) {
        if (i % (n + kPad) >= n) {
          EXPECT_EQ(now[i], old[i]) << "between rows, at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moebius::cpu
