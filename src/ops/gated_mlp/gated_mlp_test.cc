#include "ops/gated_mlp/gated_mlp.h"

#include <optional>

#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "ops/activation/activation_ref.h"
#include "ops/cpu/testing.h"
#include "ops/gemm/gemm_ref.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

struct Case {
  int64_t T, D, F;
  DType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // The last seven are for tiles: ragged in rows, depth and columns; one row; deeper than the
    // stores of a tile last; rows that do not begin at multiples of 16 bytes.
    for (const auto& [T, D, F] : std::vector<std::array<int64_t, 3>>{{0, 3, 2},
                                                                     {1, 1, 1},
                                                                     {5, 7, 3},
                                                                     {33, 20, 18},
                                                                     {300, 200, 136},
                                                                     {1, 64, 264},
                                                                     {129, 1160, 24},
                                                                     {260, 72, 520},
                                                                     {300, 203, 135},
                                                                     {130, 34, 51},
                                                                     {260, 130, 267}}) {
      all.push_back({T, D, F, dtype});
    }
  }
  return all;
}

struct Problem {
  explicit Problem(const Case& c)
      : c(c),
        x(Array::normal({c.T, c.D}, c.dtype, 1)),
        w1(Array::normal({2 * c.F, c.D}, c.dtype, 2, 2 / std::sqrt(static_cast<double>(c.D)))),
        dy(Array::normal({c.T, c.D}, c.dtype, 3)),
        w2(Array::normal({c.D, c.F}, c.dtype, 4, 1 / std::sqrt(static_cast<double>(c.D)))),
        h(Array::normal({c.T, 2 * c.F}, c.dtype, 5, 2)) {}
  Case c;
  Array x, w1, dy, w2, h;
};

struct Outputs {
  Array h, a, dh, a_again;
  std::vector<Array> all() const { return {h, a, dh, a_again}; }
};

Outputs run(Stream& s, Problem& p, bool fused, bool few_rows = false) {
  const auto& [T, D, F, dtype] = p.c;
  Outputs o{.h = Array::poisoned({T, 2 * F}, dtype),
            .a = Array::poisoned({T, F}, dtype),
            .dh = Array::poisoned({T, 2 * F}, dtype),
            .a_again = Array::poisoned({T, F}, dtype)};
  Array da = Array::poisoned({T, F}, dtype);
  gated_up(s, {.h_T2F = o.h.tensor(),
               .a_TF = o.a.tensor(),
               .x_TD = p.x.tensor(),
               .w_2FD = p.w1.tensor(),
               .fused = fused,
               .few_rows = few_rows});
  d_gated_down(s, {.dh_T2F = o.dh.tensor(),
                   .a_TF = o.a_again.tensor(),
                   .da_TF = da.tensor(),
                   .dy_TD = p.dy.tensor(),
                   .w_DF = p.w2.tensor(),
                   .h_T2F = p.h.tensor(),
                   .fused = fused});
  return o;
}

class GatedMlpTest : public testing::DeviceTest<Case> {};

void expect_reference(Problem& p, const Outputs& o) {
  const auto& [T, D, F, dtype] = p.c;
  const double rounding = testing::epsilon(dtype) + 12 * testing::epsilon(DType::f32),
               sum = 0x1p-22 * std::sqrt(static_cast<double>(D));
  Values h, da;
  ref::gemm({.c = h, .a = p.x.values(), .b = p.w1.values(), .m = T, .n = 2 * F, .k = D, .trans_b = true});
  testing::expect_close("h", o.h.values(), h, rounding + sum, 1e-6);
  testing::expect_close("a", o.a.values(), ref::swiglu_fwd(o.h.values(), F), rounding, 1e-6);
  ref::gemm({.c = da, .a = p.dy.values(), .b = p.w2.values(), .m = T, .n = F, .k = D});
  testing::expect_close("dh", o.dh.values(), ref::swiglu_bwd(da, p.h.values(), F), 2 * rounding + sum, 1e-6);
  testing::expect_close("a again", o.a_again.values(), ref::swiglu_fwd(p.h.values(), F), rounding, 1e-6);
}

TEST_P(GatedMlpTest, EqualsTheReference) {
  Problem p(c());
  expect_reference(p, run(s_, p, true));
}

TEST_P(GatedMlpTest, OfFewRowsEqualsTheReference) {
  Problem p(c());
  expect_reference(p, run(s_, p, true, true));
}

// With the limits of another GPU the portable kernels run.
TEST_P(GatedMlpTest, OtherGpusHaveTheReferenceInBothPasses) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "the limits are a GPU's";
  Problem p(c());
  for (const int minor : {0, 9}) {
    const GpuLimitsScope other(s_, documented_gpu_limits(8, minor, 2));
    const Outputs one = run(s_, p, true), two = run(s_, p, false);
    expect_reference(p, one);
    for (size_t i = 0; i < one.all().size(); ++i)
      EXPECT_EQ(one.all()[i].bytes(), two.all()[i].bytes()) << "output " << i;
  }
}

// Each block walks over many tiles, which changes no sum.
TEST_P(GatedMlpTest, FewBlocksGiveTheSameBits) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "blocks are a GPU's";
  Problem p(c());
  const std::vector<Array> all = run(s_, p, true).all();
  for (const int blocks : {2, 6}) {
    const BlockLimitScope few(s_, blocks);
    const std::vector<Array> by_few = run(s_, p, true).all();
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(by_few[i].bytes(), all[i].bytes()) << "output " << i;
  }
}

TEST_P(GatedMlpTest, TwoPassesHaveTheBitsOfOne) {
  Problem p(c());
  const std::vector<Array> one = run(s_, p, true).all(), two = run(s_, p, false).all();
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(one[i].bytes(), two[i].bytes()) << "output " << i;
}

INSTANTIATE_TEST_SUITE_P(Shapes, GatedMlpTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST(GatedMlp, SameBitsForAnyTeam) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Problem p({70, 40, 48, dtype});
    testing::expect_same_bits_for_any_team([&](Stream& s) { return run(s, p, true).all(); });
  }
}

TEST(GatedMlp, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({2, 5}, DType::f32), w1({6, 5}, DType::f32), h({2, 6}, DType::f32), a({2, 3}, DType::f32),
      w2({5, 3}, DType::f32), ids({2, 5}, DType::i32);
  const GatedUp up{.h_T2F = h.tensor(), .a_TF = a.tensor(), .x_TD = x.tensor(), .w_2FD = w1.tensor()};
  GatedUp bad = up;
  bad.x_TD = ids.tensor();
  EXPECT_EQ(testing::error_of([&] { gated_up(s, bad); }), "gated_up: x must be an f32 or bf16 matrix; got i32[2, 5]");
  bad = up;
  bad.w_2FD = w2.tensor();
  EXPECT_EQ(testing::error_of([&] { gated_up(s, bad); }), "gated_up: w must be f32[6, 5]; got f32[5, 3]");
  const DGatedDown down{.dh_T2F = h.tensor(),
                        .a_TF = a.tensor(),
                        .da_TF = a.tensor(),
                        .dy_TD = x.tensor(),
                        .w_DF = w1.tensor(),
                        .h_T2F = h.tensor()};
  EXPECT_EQ(testing::error_of([&] { d_gated_down(s, down); }), "d_gated_down: w must be f32[5, 3]; got f32[6, 5]");
}

TEST(GatedMlp, OneQuantisedOperandIsRefused) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({2, 5}, DType::f32), scales({1, 1}, DType::f32);
  const Operand plain = x.tensor(), scaled(x.tensor(), scales.tensor(), ScaleLayout::square_blocks);
  const auto message = [](const char* who, const char* name, const char* got) {
    return fmt::format("{}: {} and w must both be quantised, or both plain; got {}", who, name, got);
  };
  constexpr const char *kLeft = "f32[2, 5] with square_blocks scales f32[1, 1] and f32[2, 5]",
                       *kRight = "f32[2, 5] and f32[2, 5] with square_blocks scales f32[1, 1]";
  const auto error = [](auto&& body) { return testing::error_of(body); };
  Array h4({2, 4}, DType::f32), a2({2, 2}, DType::f32);
  const GatedUp up{.h_T2F = h4.tensor(), .a_TF = a2.tensor()};
  GatedUp bad = up;
  bad.x_TD = scaled, bad.w_2FD = plain;
  EXPECT_EQ(error([&] { gated_up(s, bad); }), message("gated_up", "x", kLeft));
  bad.x_TD = plain, bad.w_2FD = scaled;
  EXPECT_EQ(error([&] { gated_up(s, bad); }), message("gated_up", "x", kRight));
  DGatedDown down{.dh_T2F = h4.tensor(), .a_TF = a2.tensor(), .da_TF = a2.tensor(), .h_T2F = h4.tensor()};
  down.dy_TD = scaled, down.w_DF = plain;
  EXPECT_EQ(error([&] { d_gated_down(s, down); }), message("d_gated_down", "dy", kLeft));
  down.dy_TD = plain, down.w_DF = scaled;
  EXPECT_EQ(error([&] { d_gated_down(s, down); }), message("d_gated_down", "dy", kRight));
}

// One pass, two, and few blocks of a GPU have the same bits.
void expect_bits_of_two_passes(ScaleLayout rows, ScaleLayout weights, int64_t F) {
  const DType of_dy = rows == ScaleLayout::per_tensor ? DType::f8_e5m2 : DType::f8_e4m3;
  testing::on_each_device([&](Stream& s) {
    const int64_t T = 200, D = 144;
    Array x = Array::normal({T, D}, DType::bf16, 1), w1 = Array::normal({2 * F, D}, DType::bf16, 2),
          w2 = Array::normal({D, F}, DType::bf16, 3);
    QuantisedArray x_q({T, D}, DType::f8_e4m3, rows), dy_q({T, D}, of_dy, rows),
        w1_q({2 * F, D}, DType::f8_e4m3, weights), w2_q({F, D}, DType::f8_e4m3, weights, true);
    quantize(s, {.q = x_q.operand(), .x_RC = x.tensor()});
    quantize(s, {.q = dy_q.operand(), .x_RC = x.tensor()});
    quantize(s, {.q = w1_q.operand(), .x_RC = w1.tensor()});
    quantize(s, {.q = w2_q.operand(), .x_RC = w2.tensor()});
    const auto run = [&](bool fused) {
      std::vector<Array> out{Array({T, 2 * F}, DType::bf16), Array({T, F}, DType::bf16), Array({T, 2 * F}, DType::bf16),
                             Array({T, F}, DType::bf16)};
      Array da({T, F}, DType::bf16);
      gated_up(s, {.h_T2F = out[0].tensor(),
                   .a_TF = out[1].tensor(),
                   .x_TD = x_q.operand(),
                   .w_2FD = w1_q.operand(),
                   .fused = fused});
      d_gated_down(s, {.dh_T2F = out[2].tensor(),
                       .a_TF = out[3].tensor(),
                       .da_TF = da.tensor(),
                       .dy_TD = dy_q.operand(),
                       .w_DF = w2_q.operand(),
                       .h_T2F = out[0].tensor(),
                       .fused = fused});
      return out;
    };
    const std::vector<Array> one = run(true), two = run(false);
    std::optional<BlockLimitScope> few;
    if (s.device() == DeviceKind::cuda) few.emplace(s, 2);
    const std::vector<Array> by_few = run(true);
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(one[i].bytes(), two[i].bytes()) << "output " << i;
      EXPECT_EQ(one[i].bytes(), by_few[i].bytes()) << "output " << i << " by few blocks";
    }
  });
}

TEST(GatedMlp, QuantisedOperandsHaveTheBitsOfTwoPasses) {
  expect_bits_of_two_passes(ScaleLayout::row_blocks, ScaleLayout::square_blocks, 256);
}

TEST(GatedMlp, OperandsWithScalesOfTensorsHaveTheBitsOfTwoPasses) {
  for (const int64_t F : {256, 80}) expect_bits_of_two_passes(ScaleLayout::per_tensor, ScaleLayout::per_tensor, F);
}

TEST(GatedMlp, NullDeviceCounts) {
  const auto null = [](Shape shape) { return testing::null_tensor(shape, DType::bf16); };
  const Cost cost = testing::cost_on_null([&](Stream& s) {
    gated_up(s, {.h_T2F = null({3, 8}), .a_TF = null({3, 4}), .x_TD = null({3, 5}), .w_2FD = null({8, 5})});
    d_gated_down(s, {.dh_T2F = null({3, 8}),
                     .a_TF = null({3, 4}),
                     .da_TF = null({3, 4}),
                     .dy_TD = null({3, 5}),
                     .w_DF = null({5, 4}),
                     .h_T2F = null({3, 8})});
  });
  EXPECT_EQ(cost.flops, 2 * 3 * 8 * 5 + 2 * 3 * 4 * 5);
  EXPECT_EQ(cost.bytes, 2 * (15 + 40 + 24 + 12) + 2 * (15 + 20 + 24 + 24 + 12));
}

}  // namespace
}  // namespace moebius
