// quantize() of more rows than a grid has blocks in its second dimension, on a GPU.
#include "ops/quantize/quantize.h"

#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::GpuTensors;

// A grid has at most 65535 blocks in its second dimension. Of 128 rows each, these need 65537.
constexpr int64_t kTailBegin = int64_t{65535} * 128, kRows = kTailBegin + 168, kColumns = 16;

// The last rows have the bytes that they have alone: those of Hopper's kernels for bf16, and of the portable ones for f32.
TEST(QuantizeOnGpu, TakesMoreRowsThanTheSecondDimensionOfAGrid) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    SCOPED_TRACE(name_of(dtype));
    GpuTensors on_gpu(s);
    const Tensor x = on_gpu.normal({kRows, kColumns}, dtype), tail = x.rows(kTailBegin, kRows);
    const Operand all = on_gpu.quantised(x.shape, ScaleLayout::row_blocks),
                  alone = on_gpu.quantised(tail.shape, ScaleLayout::row_blocks);
    quantize(s, {.q = all, .x_RC = x});
    quantize(s, {.q = alone, .x_RC = tail});
    EXPECT_EQ(on_gpu.bytes(all.data.rows(kTailBegin, kRows)), on_gpu.bytes(alone.data));
    EXPECT_EQ(on_gpu.bytes(all.scales.rows(kTailBegin, kRows)), on_gpu.bytes(alone.scales));
  }
}

TEST(QuantizeOnGpu, TransposesMoreRowsThanTheSecondDimensionOfAGrid) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const int64_t width = padded_rows(kRows), tail_width = width - kTailBegin;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    SCOPED_TRACE(name_of(dtype));
    GpuTensors on_gpu(s);
    const Tensor x = on_gpu.normal({kRows, kColumns}, dtype);
    const Operand all = on_gpu.quantised({kColumns, width}, ScaleLayout::row_blocks, true),
                  alone = on_gpu.quantised({kColumns, tail_width}, ScaleLayout::row_blocks, true);
    quantize(s, {.q = all, .x_RC = x});
    quantize(s, {.q = alone, .x_RC = x.rows(kTailBegin, kRows)});
    const Tensor elements = all.data.view({kColumns * width});
    for (int64_t c = 0; c < kColumns; ++c) {
      EXPECT_EQ(on_gpu.bytes(elements.rows(c * width + kTailBegin, (c + 1) * width)),
                on_gpu.bytes(alone.data.rows(c, c + 1)))
          << "column " << c;
    }
  }
}

}  // namespace
}  // namespace moebius
