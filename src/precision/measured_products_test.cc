#include "precision/measured_products.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

const MeasuredProduct* timed(const ProductShape& shape, PrecisionRecipe recipe = PrecisionRecipe::fp8_block) {
  return measured_product(shape, measured_products(recipe));
}

TEST(MeasuredProduct, IsThatOfTheNearestShape) {
  const MeasuredProduct* o = timed({.rows = 20000, .out = 2048, .in = 4000});
  ASSERT_NE(o, nullptr);
  EXPECT_EQ(o->shape.in, 4096);
  EXPECT_EQ(timed({.rows = 32768, .out = 5120, .in = 2048})->shape.out, 5120);
  const MeasuredProduct* experts = timed({.is_experts = true, .rows = 2048, .out = 1536, .in = 2048});
  ASSERT_NE(experts, nullptr);
  EXPECT_NEAR(experts->forward.ratio(), 0.800, 0.005);
}

TEST(MeasuredProduct, OfFp8TensorHasARowOfFp8BlockToo) {
  for (const MeasuredProduct& tensor : measured_products(PrecisionRecipe::fp8_tensor)) {
    const MeasuredProduct* block = timed(tensor.shape);
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(block->shape.rows, tensor.shape.rows);
    EXPECT_EQ(block->shape.out, tensor.shape.out);
  }
  EXPECT_TRUE(measured_products(PrecisionRecipe::mxfp8).empty());
}

TEST(MeasuredProduct, IsAbsentForShapesFarFromAllMeasuredOnes) {
  EXPECT_EQ(timed({.rows = 32768, .out = 128, .in = 128}), nullptr);
  EXPECT_EQ(timed({.rows = 1000, .out = 5120, .in = 2048}), nullptr);
  EXPECT_EQ(timed({.is_experts = true, .rows = 32768, .out = 5120, .in = 2048}), nullptr);
}

}  // namespace
}  // namespace moebius
