#include "precision/measured_products.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(MeasuredProduct, IsThatOfTheNearestShape) {
  const MeasuredProduct* o = measured_product({.rows = 20000, .out = 2048, .in = 4000});
  ASSERT_NE(o, nullptr);
  EXPECT_EQ(o->shape.in, 4096);
  EXPECT_EQ(measured_product({.rows = 32768, .out = 5120, .in = 2048})->shape.out, 5120);
  const MeasuredProduct* experts = measured_product({.is_experts = true, .rows = 2048, .out = 1536, .in = 2048});
  ASSERT_NE(experts, nullptr);
  EXPECT_NEAR(experts->forward.ratio(), 0.715, 0.005);
}

TEST(MeasuredProduct, IsAbsentForShapesFarFromAllMeasuredOnes) {
  EXPECT_EQ(measured_product({.rows = 32768, .out = 128, .in = 128}), nullptr);
  EXPECT_EQ(measured_product({.rows = 1000, .out = 5120, .in = 2048}), nullptr);
  EXPECT_EQ(measured_product({.is_experts = true, .rows = 32768, .out = 5120, .in = 2048}), nullptr);
}

}  // namespace
}  // namespace moebius
