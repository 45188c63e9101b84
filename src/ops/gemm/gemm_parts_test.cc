// Weight gradients of quantised operands whose tiles a GPU cuts over K (ops/experts/wgrad_parts.h).
#include <gtest/gtest.h>

#include <array>

#include "device/accelerator.h"
#include "device/block_limit.h"
#include "ops/experts/wgrad_parts.h"
#include "ops/gemm/gemm.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Format {
  ScaleLayout left, right;
  DType of_left;
};
constexpr Format kFormats[] = {{ScaleLayout::row_blocks, ScaleLayout::square_blocks, DType::f8_e4m3},
                               {ScaleLayout::per_tensor, ScaleLayout::per_tensor, DType::f8_e5m2}};

// dW (+)= dy^T x over T tokens, of quantised operands.
struct Gradient {
  Gradient(const Format& f, Array& dy_TN, Array& x_TK)
      : dy({dy_TN.tensor().dim(1), padded_rows(dy_TN.tensor().dim(0))}, f.of_left, f.left, true),
        x({x_TK.tensor().dim(1), padded_rows(x_TK.tensor().dim(0))}, DType::f8_e4m3, f.right, true) {
    ThreadPool pool(2);
    Stream s(DeviceKind::cpu, pool);
    quantize(s, {.q = dy.operand(), .x_RC = dy_TN.tensor()});
    quantize(s, {.q = x.operand(), .x_RC = x_TK.tensor()});
  }
  void add(Stream& s, Array& dw, bool accumulate) const {
    gemm(s, {.c_MN = dw.tensor(), .a = dy.operand(), .b = x.operand(), .trans_a = true, .accumulate = accumulate});
  }
  testing::QuantisedArray dy, x;
};

Array integers(const Shape& shape, DType dtype, uint32_t seed) {
  Values v(shape.numel());
  for (double& x : v) {
    seed = seed * 1664525 + 1013904223;
    x = static_cast<int>(seed >> 24) % 5 - 2;
  }
  return Array::of(shape, dtype, v);
}

bool is_cut(int64_t T, int64_t n, int64_t k) { return wgrad_parts(n, k, padded_rows(T)).cut > 0; }

// All sums of these operands are exact, so every order of them gives the same bits.
TEST(GemmParts, AreTheProductOfTheCpu) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream cpu(DeviceKind::cpu, pool), gpu = testing::stream_on(DeviceKind::cuda, pool);
  for (const auto& [T, n, k] : {std::array<int64_t, 3>{4100, 260, 276},  // 4 tiles
                                {4096, 16, 16},
                                {2100, 16, 16912}}) {  // 66 whole tiles and one that is cut
    ASSERT_TRUE(is_cut(T, n, k));
    Array dy = integers({T, n}, DType::bf16, 1), x = integers({T, k}, DType::bf16, 2);
    for (const Format& format : kFormats) {
      const Gradient gradient(format, dy, x);
      for (const bool accumulate : {false, true}) {
        Array want = integers({n, k}, DType::f32, 3), got = want;
        gradient.add(cpu, want, accumulate);
        gradient.add(gpu, got, accumulate);
        EXPECT_TRUE(got.bytes() == want.bytes()) << n << " x " << k << " by " << name_of(format.of_left);
      }
    }
  }
}

TEST(GemmParts, HaveTheSameBitsEachTimeInGraphsAndWithFewBlocks) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  constexpr int64_t T = 4100, n = 260, k = 276;
  ASSERT_TRUE(is_cut(T, n, k));
  ThreadPool pool(2);
  Stream s = testing::stream_on(DeviceKind::cuda, pool);
  Array dy = Array::normal({T, n}, DType::bf16, 1), x = Array::normal({T, k}, DType::bf16, 2);
  for (const Format& format : kFormats) {
    const Gradient gradient(format, dy, x);
    Array start = Array::normal({n, k}, DType::f32, 3), first = start, second = start, few = start, captured = start;
    gradient.add(s, first, true);
    gradient.add(s, second, true);
    {
      const BlockLimitScope limit(s, 6);
      gradient.add(s, few, true);
    }
    GraphCapture capture;
    const CudaGraph graph(s.accelerator(), capture, [&] { gradient.add(s, captured, true); });
    graph.replay(s.accelerator());
    synchronize(s);
    EXPECT_FALSE(first.bytes() == start.bytes());
    for (const Array* other : {&second, &few, &captured}) EXPECT_TRUE(other->bytes() == first.bytes());
  }
}

}  // namespace
}  // namespace moebius
