// The stats that quantising reports, counted again element by element.
#include "ops/quantize/quantize_ref.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::SharedBytes;
using testing::Values;

using Sums = std::vector<double>;

Sums stats_on(Stream& s, Quantize a, const Sums& before = Sums(5)) {
  SharedBytes sums(5 * sizeof(double));
  std::memcpy(sums.data(), before.data(), 5 * sizeof(double));
  a.stats_5 = {.data = sums.data(), .shape = {5}, .dtype = DType::f64};
  quantize(s, a);
  sums.settle();
  Sums after(5);
  std::memcpy(after.data(), sums.data(), 5 * sizeof(double));
  return after;
}

Sums stats_of(Array x, DType element, ScaleLayout layout, bool transposed = false, const Sums& before = Sums(5)) {
  ThreadPool pool{2};
  Stream s(DeviceKind::cpu, pool);
  const Shape shape = x.tensor().shape, of_q = transposed ? Shape{shape[1], padded_rows(shape[0])} : shape;
  const QuantisedArray q(of_q, element, layout, transposed);
  return stats_on(s, {.q = q.operand(), .x_RC = x.tensor()}, before);
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

// Every device counts what the CPU counts, and adds to what the sums held.
TEST(QuantizeStats, AreThoseOfTheCpuOnEachDevice) {
  struct Format {
    DType element;
    ScaleLayout layout;
  };
  const std::vector<Format> formats{
      {DType::f8_e4m3, ScaleLayout::per_tensor},    {DType::f8_e5m2, ScaleLayout::per_tensor},
      {DType::f8_e4m3, ScaleLayout::row_blocks},    {DType::f8_e4m3, ScaleLayout::mx_blocks},
      {DType::f8_e4m3, ScaleLayout::square_blocks}, {DType::f4_e2m1, ScaleLayout::nv_blocks}};
  const Shape shape{300, 272};
  Values x = Array::normal(shape, DType::f32, 9).values();
  for (size_t i = 0; i < x.size(); ++i) x[i] = i % 7 == 0 ? 0 : x[i] * std::exp2(static_cast<double>(i % 23) - 20);
  Array offsets = Array::of_ints({4}, {0, 120, 120, 290}), token = Array::of_ints({300}, [] {
                                                             std::vector<int32_t> rows(300);
                                                             for (int i = 0; i < 300; ++i)
                                                               rows[static_cast<size_t>(i)] = i * 7 % 300;
                                                             return rows;
                                                           }());
  ThreadPool pool{2};
  Stream cpu(DeviceKind::cpu, pool);
  testing::on_each_device([&](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Array of_x = Array::of(shape, dtype, x);
      for (const Format& f : formats) {
        for (const int way : {0, 1, 2, 3}) {  // rows; a transposed copy; rows of experts; rows that are gathered
          const int64_t padded = way == 3 ? padded_rows(300, 3) : padded_rows(300);
          const bool transposed = way == 1 || way == 3;
          const QuantisedArray q(transposed ? Shape{272, padded} : shape, f.element, f.layout, transposed);
          Quantize a{.q = q.operand(), .x_RC = of_x.tensor()};
          if (way >= 2) a.offsets_e1 = offsets.tensor();
          if (way == 3) a.token_R = token.tensor();
          a.hadamard = f.layout == ScaleLayout::nv_blocks && transposed;
          const Sums want = stats_on(cpu, a, {10, 1, 1, 0x1p-20, 0.5});
          if (f.element != DType::f8_e5m2) {
            EXPECT_GT(want[2], 1);
          }
          EXPECT_EQ(stats_on(s, a, {10, 1, 1, 0x1p-20, 0.5}), want) << to_string(a.q) << " way " << way;
          EXPECT_EQ(stats_on(s, a), stats_on(cpu, a)) << to_string(a.q) << " way " << way;
        }
      }
    }
  });
}

}  // namespace
}  // namespace moebius
