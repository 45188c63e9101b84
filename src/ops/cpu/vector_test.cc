#include "ops/cpu/vector.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace moebius::cpu {
namespace {

double ulps(float got, double want) {
  const float nearest = static_cast<float>(want);
  return std::abs(got - want) / (std::nextafter(nearest, std::numeric_limits<float>::infinity()) - nearest);
}

TEST(ExpF32, WithinTwoUlpOfTheTruth) {
  double worst = 0;
  for (float x = -87.3f; x <= 88.3f; x += 1.37e-3f)
    worst = std::max(worst, ulps(exp_f32(x), std::exp(static_cast<double>(x))));
  for (float x = 1e-9f; x < 1; x *= 1.01f)
    worst = std::max({worst, ulps(exp_f32(x), std::exp(double{x})), ulps(exp_f32(-x), std::exp(-double{x}))});
  EXPECT_LT(worst, 2);
  EXPECT_GT(worst, 0.4);  // not exact: the measure works
}

TEST(ExpF32, InfinitiesGiveFiniteResults) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_f32(0), 1);
  EXPECT_LT(exp_f32(-inf), 2e-38f);
  EXPECT_GE(exp_f32(-inf), 0);
  EXPECT_LT(exp_f32(inf), inf);
  EXPECT_TRUE(std::isnan(exp_f32(std::numeric_limits<float>::quiet_NaN())));
}

TEST(ExpF32, AVectorLoopGivesTheBitsOfAScalarCall) {
  std::vector<float> x(1001), y(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = -30.0f + 0.0613f * static_cast<float>(i);
#pragma omp simd
  for (size_t i = 0; i < x.size(); ++i) y[i] = exp_f32(x[i]);
  for (size_t i = 0; i < x.size(); ++i) {
    volatile float one = x[i];
    EXPECT_EQ(y[i], exp_f32(one));
  }
}

}  // namespace
}  // namespace moebius::cpu
