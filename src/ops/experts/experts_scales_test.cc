// Products of experts with FP8 operands whose scales have products at the ends of f32, and of many experts, on every
// device: against the definitions in double, on the values of the operands.
#include <cmath>

#include "ops/experts/experts_quantised_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;
using enum ScaleLayout;

struct Format {
  const char* name;
  DType left;  // elements; those of the right side are E4M3
  ScaleLayout left_scales, right_scales;
};
const std::vector<Format> kFormats{{"blocks", DType::f8_e4m3, row_blocks, square_blocks},
                                   {"tensors", DType::f8_e5m2, per_tensor, per_tensor}};

void on_each_device_and_format(const std::function<void(Stream&, const Format&)>& body) {
  testing::on_each_device([&](Stream& s) {
    for (const Format& format : kFormats) {
      SCOPED_TRACE(format.name);
      body(s, format);
    }
  });
}

// dw[e] = left^T right over the rows of e, of rows in bf16 that are quantised.
struct Gradient {
  Values got, want;

  Gradient(Stream& s, const Format& format, Array left, Array right, const std::vector<int32_t>& offsets,
           const Values& added_to = {}) {
    const int64_t R = left.tensor().dim(0), M = left.tensor().dim(1), N = right.tensor().dim(1);
    const auto E = static_cast<int64_t>(offsets.size()) - 1, padded = padded_rows(R, E);
    QuantisedArray left_q({M, padded}, format.left, format.left_scales, true),
        right_q({N, padded}, DType::f8_e4m3, format.right_scales, true);
    Array of_offsets = Array::of_ints({E + 1}, offsets);
    quantize(s, {.q = left_q.operand(), .x_RC = left.tensor(), .offsets_e1 = of_offsets.tensor()});
    quantize(s, {.q = right_q.operand(), .x_RC = right.tensor(), .offsets_e1 = of_offsets.tensor()});
    Array dw = added_to.empty() ? Array::poisoned({E, M, N}, DType::f32) : Array::of({E, M, N}, DType::f32, added_to);
    testing::run_expert_op<ExpertWgrad>(s, expert_wgrad,
                                        {.dw_eMN = dw.tensor(),
                                         .left_RM = left_q.operand(),
                                         .right_RN = right_q.operand(),
                                         .accumulate = !added_to.empty(),
                                         .rows = {of_offsets.tensor(), {}}});
    got = dw.values();
    want = added_to.empty() ? Values(static_cast<size_t>(E * M * N), 0.0) : added_to;
    const Values of_left = left_q.values(s), of_right = right_q.values(s);
    for (int64_t e = 0; e < E; ++e) {
      const int64_t begin = group_begin(offsets[e], e);
      for (int64_t r = begin; r < begin + offsets[e + 1] - offsets[e]; ++r) {
        for (int64_t m = 0; m < M; ++m) {
          for (int64_t n = 0; n < N; ++n)
            want[(e * M + m) * N + n] += of_left[m * padded + r] * of_right[n * padded + r];
        }
      }
    }
  }
};

Values times(Values x, double factor) {
  for (double& v : x) v *= factor;
  return x;
}

// The top of the elements: the largest one is 1.75 * 2^top.
int top_of(DType element) { return element == DType::f8_e5m2 ? 15 : 8; }

// Multiples of 1/8 from -7/8 to 7/8 [rows, columns]. They are 15, and all of them are in 15 consecutive rows of a
// column and in 15 consecutive columns of a row. So the scale of a block is 2^(-1 - top), and its elements are exact.
Values eighths(int64_t rows, int64_t columns, int64_t row_step, int64_t column_step) {
  Values x;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c)
      x.push_back(static_cast<double>((r * row_step + c * column_step) % 15 - 7) / 8);
  }
  return x;
}

// The product of the scales is the smallest number of f32.
TEST(ScalesOfExperts, SmallScalesGiveSmallGradients) {
  on_each_device_and_format([](Stream& s, const Format& format) {
    constexpr int64_t kR = 200, kM = 48, kN = 64;
    const double left = std::ldexp(1, top_of(format.left) - 78), right = 0x1p-61;
    const Gradient g(s, format, Array::of({kR, kM}, DType::bf16, times(eighths(kR, kM, 7, 4), left)),
                     Array::of({kR, kN}, DType::bf16, times(eighths(kR, kN, 11, 8), right)), {0, 150, 150, kR});
    const double size = left * right;  // of results
    testing::expect_close("dw", times(g.got, 1 / size), times(g.want, 1 / size), 0x1p-11, 1e-6);
  });
}

// The product of the scales is the largest power of two of f32. Large elements meet zeros, so sums are finite.
TEST(ScalesOfExperts, LargeScalesGiveFiniteGradients) {
  on_each_device_and_format([](Stream& s, const Format& format) {
    constexpr int64_t kR = 150, kM = 48, kN = 64;
    const int top = top_of(format.left);
    const double small = std::ldexp(1, -5 - top);  // of the left side, against its large elements
    Values left = times(eighths(kR, kM, 7, 4), std::ldexp(1, top + 72)), right = times(eighths(kR, kN, 11, 8), 0x1p65);
    for (int64_t r = 0; r < kR; ++r) {
      const int64_t kind = r / 32 % 4;
      for (int64_t m = 0; m < kM; ++m) left[r * kM + m] *= kind == 0 ? 0 : kind == 2 ? 1 : small;
      for (int64_t n = 0; n < kN; ++n) right[r * kN + n] *= kind == 0 ? 1 : kind == 2 ? 0 : 0x1p-13;
    }
    const Gradient g(s, format, Array::of({kR, kM}, DType::bf16, left), Array::of({kR, kN}, DType::bf16, right),
                     {0, kR});
    constexpr double kSize = 0x1p119;  // of results
    testing::expect_close("dw", times(g.got, 1 / kSize), times(g.want, 1 / kSize), 0x1p-11, 1e-6);
  });
}

// The same for rows and weights.
TEST(ScalesOfExperts, LargeScalesOfRowsAndWeightsGiveZeros) {
  testing::on_each_device([](Stream& s) {
    for (const bool blocks : {true, false}) {
      constexpr int64_t kR = 140, kD = 48, kF = 128;
      Values a = times(eighths(kR, kF, 7, 4), 0x1p80), w2 = times(eighths(2 * kD, kF, 11, 8), 0x1p65);
      for (size_t i = 0; i < a.size(); ++i) a[i] *= i % kF < kF / 2;
      for (size_t i = 0; i < w2.size(); ++i) w2[i] *= i % kF >= kF / 2;
      QuantisedArray a_q({kR, kF}, DType::f8_e4m3, blocks ? row_blocks : per_tensor),
          w2_q({2, kD, kF}, DType::f8_e4m3, blocks ? square_blocks : per_tensor);
      quantize(s, {.q = a_q.operand(), .x_RC = Array::of({kR, kF}, DType::bf16, a).tensor()});
      quantize(s, {.q = w2_q.operand(), .x_RC = Array::of({2, kD, kF}, DType::bf16, w2).tensor()});
      Array y = Array::poisoned({kR, kD}, DType::bf16), offsets = Array::of_ints({3}, {0, 130, kR});
      testing::run_expert_op<ExpertDown>(
          s, expert_down,
          {.y_RD = y.tensor(), .a_RF = a_q.operand(), .w2_eDF = w2_q.operand(), .rows = {offsets.tensor(), {}}});
      for (const double value : y.values()) ASSERT_EQ(value, 0) << (blocks ? "blocks" : "tensors");
    }
  });
}

// The largest number of experts that a GPU's kernel balances over its blocks, and more; most have no row or few.
TEST(ManyExperts, GradientsAreThoseOfTheReference) {
  on_each_device_and_format([](Stream& s, const Format& format) {
    for (const int32_t E : {860, 861, 1100}) {
      SCOPED_TRACE(E);
      constexpr int64_t kM = 272, kN = 16;
      std::vector<int32_t> offsets{0};
      for (int32_t e = 0; e < E; ++e) offsets.push_back(offsets.back() + (e % 97 == 5 ? 131 : e % 3));
      const int64_t R = offsets.back();
      const Array left = Array::normal({R, kM}, DType::bf16, 1), right = Array::normal({R, kN}, DType::bf16, 2);
      const double sum = s.device() == DeviceKind::cuda ? 0x1p-11 : 0x1p-18;
      const Gradient stored(s, format, left, right, offsets);
      testing::expect_close("dw", stored.got, stored.want, sum, 1e-6);
      const Gradient added(s, format, left, right, offsets, Array::normal({E, kM, kN}, DType::f32, 3).values());
      testing::expect_close("added dw", added.got, added.want, sum, 1e-6);
    }
  });
}

}  // namespace
}  // namespace moebius
