#include "core/quantized.h"

#include <gtest/gtest.h>

#include "core/narrow_float.h"

namespace moebius {
namespace {

Tensor null_tensor(Shape shape, DType dtype) { return {.shape = shape, .dtype = dtype, .device = DeviceKind::null}; }

std::string error_of(const Operand& x) {
  try {
    check_quantised("op", "x", x);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Quantised, ScalesHaveTheShapeOfTheirBlocks) {
  using enum ScaleLayout;
  const Shape data{130, 200}, experts{3, 130, 200};
  EXPECT_EQ(scale_shape(per_tensor, data), (Shape{1}));
  EXPECT_EQ(scale_shape(row_blocks, data), (Shape{130, 2}));
  EXPECT_EQ(scale_shape(square_blocks, data), (Shape{2, 2}));
  EXPECT_EQ(scale_shape(mx_blocks, data), (Shape{130, 7}));
  EXPECT_EQ(scale_shape(nv_blocks, data), (Shape{130, 13}));
  EXPECT_EQ(scale_shape(per_tensor, experts), (Shape{3}));
  EXPECT_EQ(scale_shape(square_blocks, experts), (Shape{3, 2, 2}));
}

TEST(Quantised, FourBitElementsAreTwoToAByte) {
  EXPECT_EQ(bytes_of(DType::f4_e2m1, 10), 5);
  EXPECT_EQ(null_tensor({3, 4}, DType::f4_e2m1).num_bytes(), 6);
  f4_e2m1_pair pairs[6] = {};
  Tensor t{.data = pairs, .shape = {3, 4}, .dtype = DType::f4_e2m1};
  EXPECT_EQ(t.rows(1, 3).data, pairs + 2);
  EXPECT_THROW(size_of(DType::f4_e2m1), Error);
}

// Experts never share a block of 128 columns, whatever their numbers of rows.
TEST(Quantised, ExpertsBeginAtBlocksOfTheirOwn) {
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{0, 0, 0}, {1, 1, 1}, {128, 128, 1}, {127, 129, 0, 128}, {1, 127, 128, 300, 0, 5}}) {
    int64_t offset = 0, end = 0, R = 0;
    for (const int64_t n : counts) R += n;
    for (size_t e = 0; e < counts.size(); ++e) {
      const int64_t begin = group_begin(offset, static_cast<int64_t>(e));
      EXPECT_EQ(begin % kGroupAlign, 0);
      EXPECT_GE(begin, end);
      end = begin + (counts[e] + kGroupAlign - 1) / kGroupAlign * kGroupAlign;
      offset += counts[e];
    }
    EXPECT_LE(end, padded_rows(R, static_cast<int64_t>(counts.size())));
  }
  EXPECT_EQ(padded_rows(0), 0);
  EXPECT_EQ(padded_rows(129), 256);
}

TEST(Quantised, MessagesNameTheProblem) {
  const Operand good(null_tensor({4, 200}, DType::f8_e4m3), null_tensor({4, 2}, DType::f32), ScaleLayout::row_blocks);
  EXPECT_EQ(error_of(good), "no error");
  Operand bad = good;
  bad.layout = ScaleLayout::none;
  EXPECT_EQ(
      error_of(bad),
      "op: x must be a matrix, or one for each expert, with a layout of scales; got f8_e4m3[4, 200] with no scales "
      "f32[4, 2]");
  bad = good;
  bad.data.dtype = DType::bf16;
  EXPECT_EQ(error_of(bad), "op: x with row_blocks scales must be f8_e4m3 or f8_e5m2; got bf16[4, 200]");
  bad = good;
  bad.scales = null_tensor({4, 1}, DType::f32);
  EXPECT_EQ(error_of(bad), "op: the scales of x must be f32[4, 2]; got f32[4, 1]");
  const Operand nv(null_tensor({4, 15}, DType::f4_e2m1), null_tensor({4, 1}, DType::f8_e4m3), ScaleLayout::nv_blocks);
  EXPECT_EQ(error_of(nv), "op: x has two elements a byte and needs an even number of columns; got f4_e2m1[4, 15]");
  try {
    check_quantised("op", "x", good, {200, 4}, true);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "op: x must be the transposed quantised data of [200, 4], since the product sums along the rows of "
                 "data; got f8_e4m3[4, 200] with row_blocks scales f32[4, 2]");
  }
}

}  // namespace
}  // namespace moebius
