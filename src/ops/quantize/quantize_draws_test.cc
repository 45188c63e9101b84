// Stochastic rounding, and numbers beyond the largest element.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "ops/quantize/quantize_testing.h"
#include "ops/quantize/scales.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

constexpr int64_t kDrawn = 4096;

QuantisedArray drawn(Stream& s, Array& x, Shape shape, int64_t step, int64_t first_row) {
  Array draw = Array::of({2}, DType::i64, {static_cast<double>(step), static_cast<double>(first_row)});
  QuantisedArray q(shape, DType::f4_e2m1, ScaleLayout::nv_blocks);
  quantize(s, {.q = q.operand(), .x_RC = x.tensor(), .stochastic = {.draw_2 = draw.tensor(), .seed = 3, .key = 5}});
  return q;
}

// Numbers 0.7 in blocks whose scale is 1.
Array seven_tenths() {
  Values v(kDrawn * 16, 0.7);
  for (int64_t i = 0; i < kDrawn; ++i) v[i * 16] = 6;
  return Array::of({kDrawn, 16}, DType::f32, v);
}

// Returns an error of draws between 0.5 and 1 for seven_tenths(); empty if there is none.
//
// The mean of n such draws is within five standard deviations, 5 * 0.25 / sqrt(n), of the number. So is the mean over
// the pairs of neighbours in a row, and in a column, of the products of their errors, which independent draws have:
// they are at most 0.3^2, so five standard deviations are at most 5 * 0.09 / sqrt(n).
std::string wrong_draws(const Values& got) {
  double sum = 0, in_row = 0, in_column = 0;
  int64_t n = 0, pairs = 0;
  const auto error = [&](int64_t row, int64_t col) { return got[static_cast<size_t>(row * 16 + col)] - 0.7; };
  for (int64_t row = 0; row < kDrawn; ++row) {
    for (int64_t col = 1; col < 16; ++col) {
      const double x = error(row, col) + 0.7;
      if (x != 0.5 && x != 1.0) return fmt::format("{} is no neighbour", x);
      sum += x, ++n;
      if (row + 1 == kDrawn || col == 15) continue;
      in_row += error(row, col) * error(row, col + 1);
      in_column += error(row, col) * error(row + 1, col);
      ++pairs;
    }
  }
  const double mean = sum / static_cast<double>(n), bound = 5 * 0.09 / std::sqrt(static_cast<double>(pairs));
  if (std::abs(mean - 0.7) > 5 * 0.25 / std::sqrt(static_cast<double>(n))) return "the mean";
  if (std::abs(in_row / static_cast<double>(pairs)) > bound) return "neighbours in a row";
  if (std::abs(in_column / static_cast<double>(pairs)) > bound) return "neighbours in a column";
  return "";
}

TEST(Quantize, StochasticRoundingIsRightOnAverage) {
  testing::on_each_device([](Stream& s) {
    Array x = seven_tenths();
    EXPECT_EQ(wrong_draws(drawn(s, x, {kDrawn, 16}, 1, 0).values(s)), "");
    EXPECT_NE(drawn(s, x, {kDrawn, 16}, 2, 0).data(), drawn(s, x, {kDrawn, 16}, 1, 0).data());
  });
}

// The test above finds draws that are wrong.
TEST(Quantize, WrongDrawsAreFound) {
  const auto values_with = [](auto&& uniform) {
    Values got(kDrawn * 16);
    for (int64_t i = 0; i < kDrawn * 16; ++i)
      got[static_cast<size_t>(i)] = narrow_float::f4_e2m1_value(draw_f4_e2m1(0.7f, uniform(i / 16, i % 16)));
    return got;
  };
  const Rng rng(3, RngSite::rounding, 1, 5);
  const auto at = [&](int64_t i) { return rng.uniform(static_cast<uint64_t>(i)); };
  EXPECT_EQ(wrong_draws(values_with([&](int64_t row, int64_t col) { return at(row * 16 + col); })), "");
  EXPECT_EQ(wrong_draws(values_with([&](int64_t, int64_t) { return 0.5f; })), "the mean") << "to nearest";
  EXPECT_EQ(wrong_draws(values_with([&](int64_t row, int64_t col) { return 0.95f * at(row * 16 + col); })), "the mean");
  EXPECT_EQ(wrong_draws(values_with([&](int64_t row, int64_t) { return at(row); })), "neighbours in a row");
  EXPECT_EQ(wrong_draws(values_with([&](int64_t row, int64_t col) { return at(row / 2 * 16 + col); })),
            "neighbours in a column")
      << "two tokens with one draw";
  EXPECT_EQ(wrong_draws(Values(kDrawn * 16, 0.75)), "0.75 is no neighbour");
}

// The scale of a block is rounded, and may be too small for the largest number. That number becomes the largest
// element, with its sign, in either rounding and with any draw.
TEST(Quantize, NumbersBeyondTheLargestElementAreClipped) {
  // The largest number of the tensor is 6 * 448 = 2688, so that g is 1. 6 * 17 / 16 needs the scale 1.0625, which is a
  // tie between 1 and 1.125, and E4M3 has 1 for it.
  for (const double largest : {6.375, 6.2, 6.01, -6.375}) {
    testing::on_each_device([&](Stream& s) {
      Values v(64 * 16, 0.25);
      for (int64_t i = 0; i < 64; ++i) v[static_cast<size_t>(i * 16)] = i == 0 ? 2688 : largest;
      Array x = Array::of({64, 16}, DType::f32, v), draw = Array::of({2}, DType::i64, {1, 0});
      for (const bool stochastic : {false, true}) {
        QuantisedArray q({64, 16}, DType::f4_e2m1, ScaleLayout::nv_blocks);
        quantize(s, {.q = q.operand(),
                     .x_RC = x.tensor(),
                     .stochastic = {.draw_2 = stochastic ? draw.tensor() : Tensor{}, .seed = 3, .key = 5}});
        const Values got = q.values(s);
        EXPECT_EQ(got[0], 2688);
        for (size_t i = 1; i < 64; ++i) EXPECT_EQ(got[i * 16], std::copysign(6.0, largest)) << i;
      }
    });
  }
}

TEST(Quantize, DrawsOfNumbersBeyondTheLargestElementAreTheLargest) {
  for (const float u : {1e-7f, 0.3f, 0.9999999f}) {
    for (const float x : {6.0f, 6.0001f, 7.0f, 1e30f, std::numeric_limits<float>::infinity()}) {
      EXPECT_EQ(narrow_float::f4_e2m1_value(draw_f4_e2m1(x, u)), 6.0f) << x;
      EXPECT_EQ(draw_f4_e2m1(-x, u), 15) << x;
    }
    for (const float x : {448.0f, 449.0f, 480.0f, 1e30f}) EXPECT_EQ(to_f32(to_f8_e4m3(x)), 448.0f) << x;
    for (const float x : {57344.0f, 61440.0f, 1e30f}) EXPECT_EQ(to_f32(to_f8_e5m2(x)), 57344.0f) << x;
  }
}

// The scale may follow from magnitudes of other ranks alone. A number beyond it saturates in every format.
TEST(Quantize, NumbersBeyondTheMagnitudesOfRanksAreClipped) {
  testing::on_each_device([](Stream& s) {
    Values v(2 * 16, 1.0);
    v[3] = 1000, v[16 + 5] = -1000;
    Array x = Array::of({2, 16}, DType::f32, v);
    const float one = 1;
    Array magnitude = Array::of_ints({1, 1}, {std::bit_cast<int32_t>(one)});
    const std::pair<DType, double> formats[] = {{DType::f8_e4m3, 448 * 0x1p-8}, {DType::f8_e5m2, 57344 * 0x1p-15}};
    for (const auto& [element, largest] : formats) {
      QuantisedArray q({2, 16}, element, ScaleLayout::per_tensor);
      Array stats = Array::of({5}, DType::f64, Values(5, 0.0));
      quantize(s,
               {.q = q.operand(), .x_RC = x.tensor(), .stats_5 = stats.tensor(), .magnitude_WB = magnitude.tensor()});
      const Values got = q.values(s);
      EXPECT_EQ(got[3], largest);
      EXPECT_EQ(got[16 + 5], -largest);
      EXPECT_EQ(got[0], 1);
      EXPECT_EQ(stats.values()[1], 2) << "they are counted";
    }
  });
}

TEST(Quantize, StochasticRoundingDependsOnTheRowAndNotOnTheCall) {
  testing::on_each_device([](Stream& s) {
    Values v = Array::normal({64, 32}, DType::f32, 1).values();
    v[0] = v[40 * 32] = 9;  // both parts have the largest number
    Array x = Array::of({64, 32}, DType::f32, v),
          rest = Array::of({24, 32}, DType::f32, Values(v.begin() + 40 * 32, v.end()));
    const QuantisedArray whole = drawn(s, x, {64, 32}, 7, 100), part = drawn(s, rest, {24, 32}, 7, 140);
    const std::vector<unsigned char> all = whole.data();
    EXPECT_EQ(part.data(), std::vector<unsigned char>(all.begin() + 40 * 16, all.end()));
  });
}

}  // namespace
}  // namespace moebius
