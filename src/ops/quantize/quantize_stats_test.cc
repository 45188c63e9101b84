// The stats that quantising reports, counted again element by element.
#include "ops/quantize/quantize_ref.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

std::vector<double> stats_of(Array x, DType element, ScaleLayout layout, bool transposed = false,
                             std::vector<double> stats = std::vector<double>(5)) {
  ThreadPool pool{2};
  Stream s(DeviceKind::cpu, pool);
  const Shape shape = x.tensor().shape, of_q = transposed ? Shape{shape[1], padded_rows(shape[0])} : shape;
  const QuantisedArray q(of_q, element, layout, transposed);
  quantize(s, {.q = q.operand(), .x_RC = x.tensor(), .stats_5 = tensor_of(stats.data(), {5})});
  return stats;
}

// Two blocks of 32: one with values far below its largest, one of zeros.
TEST(QuantizeStats, CountsZeroedElements) {
  Values x(64, 0.0);
  x[0] = 448;
  for (int i = 1; i <= 5; ++i) x[i] = 0x1p-11 * i;  // half of the smallest E4M3 number is 2^-10
  Array row = Array::of({1, 64}, DType::f32, x);
  EXPECT_EQ(stats_of(row, DType::f8_e4m3, ScaleLayout::mx_blocks), (std::vector<double>{6, 0, 2, 1, 1}));
  EXPECT_EQ(stats_of(row, DType::f8_e4m3, ScaleLayout::mx_blocks, false, {10, 1, 1, 0.5, 8}),
            (std::vector<double>{16, 1, 3, 0.5, 8}));
}

// Padding and rows of zeros count as nothing: a transposed copy has the stats of blocks of columns.
TEST(QuantizeStats, DoNotCountPadding) {
  Values x(3 * 2, 0.0);
  x[0] = 1;
  x[3] = 1792;
  const std::vector<double> want{2, 0, 0, 0x1p-8, 4};
  EXPECT_EQ(stats_of(Array::of({3, 2}, DType::bf16, x), DType::f8_e4m3, ScaleLayout::row_blocks, true), want);
}

// The scale of a block of NVFP4 is rounded, so that its largest number may not fit.
TEST(QuantizeStats, CountsSaturatedElements) {
  Array x = Array::normal({40, 160}, DType::f32, 4);
  const std::vector<double> stats = stats_of(x, DType::f4_e2m1, ScaleLayout::nv_blocks);
  ThreadPool pool{1};
  Stream s(DeviceKind::cpu, pool);
  const QuantisedArray q({40, 160}, DType::f4_e2m1, ScaleLayout::nv_blocks);
  quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
  const Values y = q.values(s), all = x.values();
  double zeroed = 0;
  for (size_t i = 0; i < all.size(); ++i) zeroed += all[i] != 0 && y[i] == 0 ? 1 : 0;
  EXPECT_EQ(stats[0], 40 * 160);
  EXPECT_EQ(stats[2], zeroed);
  EXPECT_GT(stats[1], 0);
  EXPECT_LT(stats[1], 40 * 160 / 16);
  EXPECT_GT(stats[3], 0);
  EXPECT_LT(stats[3], stats[4]);
}

// A block with a value that is not finite has no scale to report, and is not saturated.
TEST(QuantizeStats, IgnoreNonFiniteBlocks) {
  Values x(256, 1.0);
  x[3] = std::numeric_limits<double>::infinity();
  const std::vector<double> stats =
      stats_of(Array::of({1, 256}, DType::f32, x), DType::f8_e4m3, ScaleLayout::row_blocks);
  EXPECT_EQ(stats, (std::vector<double>{256, 0, 0, 0x1p-8, 0x1p-8}));
}

}  // namespace
}  // namespace moebius
