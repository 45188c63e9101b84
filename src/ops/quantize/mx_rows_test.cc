#include "ops/quantize/mx_rows.h"

#include <cmath>
#include <limits>

#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

// Numbers of many magnitudes, with a block of zeros, an infinity and a NaN.
Array numbers(Shape shape, DType dtype) {
  Values x = Array::normal(shape, DType::f32, 3).values();
  const int64_t cols = shape[1];
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<double>(i / cols % 40) - 20.0);
  for (int64_t j = 0; j < std::min<int64_t>(cols, 32); ++j) x[j] = 0;
  if (x.size() > 500) {
    x[310] = std::numeric_limits<double>::infinity();
    x[450] = std::numeric_limits<double>::quiet_NaN();
  }
  return Array::of(shape, dtype, x);
}

// Equal, where NaN equals NaN.
void expect_same(const Values& got, const Values& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]))
      EXPECT_TRUE(std::isnan(got[i])) << what << " " << i;
    else
      ASSERT_EQ(got[i], want[i]) << what << " " << i;
  }
}

TEST(MxRound, HasTheValuesOfAQuantisedCopy) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const auto& [rows, cols] :
           std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {5, 130}, {75, 264}, {130, 31}}) {
        const std::string what = fmt::format("{} x {} of {} on {}", rows, cols, name_of(dtype), name_of(s.device()));
        Array x = numbers({rows, cols}, dtype);
        Array y = Array::poisoned({rows, cols}, dtype), want = Array::poisoned({rows, cols}, dtype);
        QuantisedArray q({rows, cols}, DType::f8_e4m3, ScaleLayout::mx_blocks);
        quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
        dequantize(s, {.x = want.tensor(), .q = q.operand()});
        mx_round(s, {.y_RC = y.tensor(), .x_NC = x.tensor()});
        expect_same(y.values(), want.values(), what);

        QuantisedArray turned({cols, padded_rows(rows)}, DType::f8_e4m3, ScaleLayout::mx_blocks, true);
        quantize(s, {.q = turned.operand(), .x_RC = x.tensor()});
        dequantize_transposed(s, {.x_RC = want.tensor(), .q = turned.operand()});
        mx_round(s, {.y_RC = y.tensor(), .x_NC = x.tensor(), .blocks_of_rows = true});
        expect_same(y.values(), want.values(), what + ", blocks of rows");
      }
    }
  });
}

// Rows past the last offset are poisoned in x and stay poisoned in y.
TEST(MxRound, BlocksOfRowsAreOfOneExpert) {
  const int64_t R = 300, T = 70, C = 72, e = 5;
  std::vector<int32_t> token(R);
  for (int64_t r = 0; r < R; ++r) token[r] = static_cast<int32_t>(r * 37 % T);
  testing::on_each_device([&](Stream& s) {
    for (const bool gathers : {false, true}) {
      Array x = numbers({gathers ? T : R, C}, DType::bf16), offsets = Array::of_ints({e + 1}, {0, 0, 5, 5, 135, 290}),
            tokens = Array::of_ints({R}, token);
      Array y = Array::poisoned({R, C}, DType::bf16), want = Array::poisoned({R, C}, DType::bf16);
      QuantisedArray q({C, padded_rows(R, e)}, DType::f8_e4m3, ScaleLayout::mx_blocks, true);
      const Tensor by_token = gathers ? tokens.tensor() : Tensor{};
      quantize(s, {.q = q.operand(), .x_RC = x.tensor(), .offsets_e1 = offsets.tensor(), .token_R = by_token});
      dequantize_transposed(s, {.x_RC = want.tensor(), .q = q.operand(), .offsets_e1 = offsets.tensor()});
      mx_round(s, {.y_RC = y.tensor(),
                   .x_NC = x.tensor(),
                   .offsets_e1 = offsets.tensor(),
                   .token_R = by_token,
                   .blocks_of_rows = true});
      expect_same(y.values(), want.values(), gathers ? "gathered" : "in order");
      if (gathers) continue;
      Array along = Array::poisoned({R, C}, DType::bf16);
      mx_round(s, {.y_RC = along.tensor(), .x_NC = x.tensor(), .offsets_e1 = offsets.tensor()});
      EXPECT_FALSE(std::isnan(along.values()[289 * C]));
      EXPECT_TRUE(std::isnan(along.values()[290 * C])) << "past the last offset";
    }
  });
}

TEST(MxRound, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x = Array::poisoned({4, 8}, DType::bf16), y = Array::poisoned({4, 8}, DType::f32),
        token = Array::of_ints({4}, {0, 1, 2, 3});
  EXPECT_EQ(testing::error_of([&] { mx_round(s, {.y_RC = y.tensor(), .x_NC = x.tensor()}); }).substr(0, 11),
            "mx_round: y");
  EXPECT_EQ(
      testing::error_of([&] { mx_round(s, {.y_RC = x.tensor(), .x_NC = x.tensor(), .token_R = token.tensor()}); }),
      "mx_round: rows are gathered by token only in blocks of rows, and with offsets; got token i32[4]");
}

}  // namespace
}  // namespace moebius
