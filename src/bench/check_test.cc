#include "bench/check.h"

#include <fmt/core.h>

#include <cmath>
#include <functional>
#include <optional>

#include "bench/attention_check.h"
#include "bench/moe_check.h"
#include "bench/moe_layer.h"
#include "bench/timing.h"
#include "io/testing.h"

namespace moebius {
namespace {

BenchSample sample_of(const std::vector<double>& got, const std::vector<double>& expected) {
  BenchSample sample;
  for (size_t i = 0; i < got.size(); ++i) sample.add(got[i], expected[i]);
  return sample;
}

void expect_wrong(const std::string& text, const std::function<void()>& check) {
  expect_error(ErrorKind::numerics, text, check);
}

// -- the comparison ----------------------------------------------------------------------------------------

// Small numbers whose sum is nearly zero. Zeros would pass a bound on sums, and a bound that does
// not know the size of the terms.
const std::vector<double> kExpected{0.03, -0.02, 0.01, -0.0201};

TEST(BenchCheck, TellsRoundingFromAWrongResult) {
  const auto scaled_by = [](double factor) {
    std::vector<double> got = kExpected;
    for (double& x : got) x *= factor;
    return got;
  };
  for (const double factor : {1.0, 1.004, 0.996}) {
    BenchLine line{.name = "op"};
    check_sample(line, "y", sample_of(scaled_by(factor), kExpected), kBf16Tolerance);
    EXPECT_NEAR(line.errors.at("y"), std::abs(factor - 1), 1e-12);
    EXPECT_NEAR(line.checksum, factor * line.expected, 1e-12);
  }
  BenchLine line{.name = "op"};
  expect_wrong("bench op: expected y within 0.016 of plain loops, relative to its size; got 0.05; the result is wrong",
               [&] { check_sample(line, "y", sample_of(scaled_by(1.05), kExpected), kBf16Tolerance); });
  for (const double factor : {0.0, -1.0, 0.95, double{NAN}})
    expect_wrong("the result is wrong",
                 [&] { check_sample(line, "y", sample_of(scaled_by(factor), kExpected), kBf16Tolerance); });
}

TEST(BenchCheck, TheLargestErrorOfALineCounts) {
  BenchLine line{.name = "op"};
  check_sample(line, "dx", sample_of({1.01}, {1}), kBf16Tolerance);
  check_sample(line, "dw", sample_of({1.001}, {1}), kBf16Tolerance);
  EXPECT_NEAR(line.largest_error(), 0.01, 1e-12);
}

TEST(BenchCheck, LargeValuesAreRefusedWhereZerosAreExpected) {
  BenchLine line{.name = "op"};
  check_sample(line, "dq", sample_of({1e-7, 0}, {0, 0}), kBf16Tolerance);
  expect_wrong("the result is wrong", [&] { check_sample(line, "dq", sample_of({0.1, 0}, {0, 0}), kBf16Tolerance); });
}

// The rounding of a difference's terms counts, but never a third of the difference.
TEST(BenchCheck, ToleranceOfADifferenceIncludesRoundingOfItsTerms) {
  BenchSample near, zero;
  near.add(0.11, 0.1, 1.0);
  zero.add(0.0, 0.01, 1.0);
  BenchLine line{.name = "op"};
  check_sample(line, "dlogits", near, kBf16Tolerance);
  expect_wrong("the result is wrong", [&] { check_sample(line, "dlogits", zero, kBf16Tolerance); });
}

// -- attention ---------------------------------------------------------------------------------------------

constexpr int64_t kBatch = 2, kSeq = 48, kHeads = 4, kGroups = 2, kWidth = 8;

// Attention in bf16 as bench_attention runs it, with a given mask.
class BenchCheckAttention : public testing::Test {
 protected:
  void run(const BenchMask& mask) {
    const int64_t T = kBatch * kSeq;
    const auto normal = [&](int64_t heads) { return tensors_.normal({T, heads, kWidth}, DType::bf16, 1.0f); };
    const auto zeros = [&](int64_t heads) { return tensors_.zeros({T, heads, kWidth}, DType::bf16); };
    fwd_ = {.o_THd = zeros(kHeads),
            .lse_TH = tensors_.zeros({T, kHeads}, DType::f32),
            .q_THd = normal(kHeads),
            .k_UGd = normal(kGroups),
            .v_UGd = normal(kGroups),
            .batch = kBatch,
            .window = mask.window,
            .scale = 0.35f};
    if (mask.documents > 1) fwd_.doc_start_T = starts(kSeq / mask.documents);
    fwd_.scratch = tensors_.bytes(AttentionFwd::scratch_bytes(fwd_, s_));
    attention_fwd(s_, fwd_);
    bwd_ = {.dq_THd = zeros(kHeads),
            .dk_TGd = zeros(kGroups),
            .dv_TGd = zeros(kGroups),
            .do_THd = normal(kHeads),
            .o_THd = fwd_.o_THd,
            .lse_TH = fwd_.lse_TH,
            .q_THd = fwd_.q_THd,
            .k_TGd = fwd_.k_UGd,
            .v_TGd = fwd_.v_UGd,
            .doc_start_T = fwd_.doc_start_T,
            .batch = kBatch,
            .window = mask.window,
            .scale = fwd_.scale};
    run_backward();
  }
  void run_backward() {
    bwd_.scratch = tensors_.bytes(AttentionBwd::scratch_bytes(bwd_, s_));
    attention_bwd(s_, bwd_);
  }
  Tensor starts(int64_t document) {
    std::vector<int32_t> start(kBatch * kSeq);
    for (size_t t = 0; t < start.size(); ++t)
      start[t] = static_cast<int32_t>(static_cast<int64_t>(t) % kSeq / document * document);
    return tensors_.ints({static_cast<int64_t>(start.size())}, start);
  }
  void check_fwd(const BenchMask& mask) {
    BenchLine line{.name = "attention_fwd"};
    check_attention(s_, line, fwd_, mask);
  }
  void check_bwd(const BenchMask& mask) {
    BenchLine line{.name = "attention_bwd"};
    check_attention(s_, line, bwd_, mask);
  }

  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  BenchTensors tensors_{s_};
  AttentionFwd fwd_;
  AttentionBwd bwd_;
};

const BenchMask kMasks[] = {{}, {.window = 5}, {.documents = 3}, {.window = 5, .documents = 3}, {.window = 1}};

TEST_F(BenchCheckAttention, CorrectResultsPass) {
  for (const BenchMask& mask : kMasks) {
    run(mask);
    check_fwd(mask);
    check_bwd(mask);
  }
}

TEST_F(BenchCheckAttention, ResultsOfAnotherMaskAreRefused) {
  run({});
  for (const BenchMask& mask : {kMasks[1], kMasks[2], kMasks[3]}) {
    expect_wrong("bench attention_fwd: expected o within", [&] { check_fwd(mask); });
    expect_wrong("bench attention_bwd: expected dq within", [&] { check_bwd(mask); });
  }
}

// The forward pass has the mask, and the backward pass has not. So the gradients of keys are wrong
// as well as dq.
TEST_F(BenchCheckAttention, ABackwardWithoutTheMaskIsRefused) {
  for (const BenchMask& mask : {kMasks[1], kMasks[2]}) {
    run(mask);
    const Tensor dq = bwd_.dq_THd;
    bwd_.dq_THd = tensors_.zeros(dq.shape, DType::bf16);
    bwd_.window = 0;
    bwd_.doc_start_T = {};
    run_backward();
    expect_wrong("bench attention_bwd: expected dq within", [&] { check_bwd(mask); });
    bwd_.dq_THd = dq;
    expect_wrong("bench attention_bwd: expected dk within", [&] { check_bwd(mask); });
  }
}

TEST_F(BenchCheckAttention, ZerosAreRefused) {
  run({});
  for (Tensor AttentionBwd::*result : {&AttentionBwd::dq_THd, &AttentionBwd::dk_TGd, &AttentionBwd::dv_TGd}) {
    const Tensor right = bwd_.*result;
    bwd_.*result = tensors_.zeros(right.shape, DType::bf16);
    expect_wrong("the result is wrong", [&] { check_bwd({}); });
    bwd_.*result = right;
  }
  fwd_.o_THd = tensors_.zeros(fwd_.o_THd.shape, DType::bf16);
  expect_wrong("expected o within", [&] { check_fwd({}); });
}

// -- the MoE layer -----------------------------------------------------------------------------------------

constexpr int64_t kCalls = 3;

// A layer after kCalls passes, and its expected results.
class BenchCheckMoe : public testing::Test {
 protected:
  void SetUp() override {
    layer_.fill(s_, bench_route(shape_, {.kind = BenchRouting::Kind::zipf}));
    layer_.clear(s_);
    for (int64_t i = 0; i < kCalls; ++i) {
      layer_.forward_router(s_);
      layer_.backward_router(s_);
    }
    check_.emplace(s_, MoeInputs{.shape = shape_,
                                 .x_TD = layer_.x_TD,
                                 .dy_TD = layer_.dy_TD,
                                 .w1_e2FD = layer_.w1_e2FD(),
                                 .w2_eDF = layer_.w2_eDF(),
                                 .topk_TK = layer_.topk_TK()});
  }
  void check_all() {
    BenchLine line{.name = "moe"};
    check_->y(s_, line, bounds_, layer_.y_TD);
    check_->dx(s_, line, bounds_, layer_.dx_TD, /*with_router=*/true);
    check_->dw(s_, line, bounds_, layer_.dw1_e2FD(), layer_.dw2_eDF(), kCalls);
  }
  template <class T>
  void scale(const Tensor& x, float factor) {
    for (int64_t i = 0; i < x.numel(); ++i) x.ptr<T>()[i] = from_f32<T>(factor * to_f32(x.ptr<T>()[i]));
  }

  const BenchShape shape_ = bench_shape("bench-cpu", 1.0 / 16);
  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  BenchMoeLayer layer_{shape_, PrecisionSpec{}, DeviceKind::cpu, pool_};
  const MoeBounds bounds_ = MoeBounds::of(PrecisionRecipe::none);
  std::optional<MoeCheck> check_;
};

TEST_F(BenchCheckMoe, AWrongValueInAnyResultIsRefused) {
  check_all();
  for (const float factor : {0.0f, 1.05f}) {
    for (const auto& [name, result] : {std::pair{"y", layer_.y_TD}, {"dx", layer_.dx_TD}}) {
      const std::vector<bf16> right(result.ptr<bf16>(), result.ptr<bf16>() + result.numel());
      scale<bf16>(result, factor);
      expect_wrong(fmt::format("bench moe: expected {} within", name), [&] { check_all(); });
      std::copy(right.begin(), right.end(), result.ptr<bf16>());
    }
    for (const auto& [name, result] : {std::pair{"dw1", layer_.dw1_e2FD()}, {"dw2", layer_.dw2_eDF()}}) {
      const std::vector<float> right(result.ptr<float>(), result.ptr<float>() + result.numel());
      scale<float>(result, factor);
      expect_wrong(fmt::format("bench moe: expected {} within", name), [&] { check_all(); });
      std::copy(right.begin(), right.end(), result.ptr<float>());
    }
  }
  check_all();
}

// One pass too few or too many is as wrong as any other factor.
TEST_F(BenchCheckMoe, GradientsAreThoseOfAllCalls) {
  layer_.forward_router(s_);
  layer_.backward_router(s_);
  expect_wrong("bench moe: expected dw1 within", [&] { check_all(); });
}

// The layer without its router omits the gradient through the logits.
TEST_F(BenchCheckMoe, AMissingGradientThroughTheLogitsIsRefused) {
  BenchLine line{.name = "moe"};
  layer_.forward(s_, true);
  layer_.backward(s_);
  check_->dx(s_, line, bounds_, layer_.dx_TD, /*with_router=*/false);
  expect_wrong("bench moe: expected dx_of_logits within",
               [&] { check_->dx(s_, line, bounds_, layer_.dx_TD, /*with_router=*/true); });
}

TEST_F(BenchCheckMoe, RoutesThatAreNotTheTopKAreRefused) {
  std::vector<int32_t> topk(layer_.topk_TK().numel());
  for (size_t i = 0; i < topk.size(); ++i)
    topk[i] = static_cast<int32_t>(i) % 2;  // experts 0 and 1 of 16, for every token
  BenchTensors tensors(s_);
  const MoeInputs wrong{.shape = shape_,
                        .x_TD = layer_.x_TD,
                        .dy_TD = layer_.dy_TD,
                        .w1_e2FD = layer_.w1_e2FD(),
                        .w2_eDF = layer_.w2_eDF(),
                        .topk_TK = tensors.ints(layer_.topk_TK().shape, topk)};
  expect_wrong("the route is wrong", [&] { MoeCheck(s_, wrong); });
}

// A quantised layer is too far from the loops for the bounds of bf16, and its results are wrong without an expert.
TEST_F(BenchCheckMoe, AQuantisedLayerHasItsOwnBounds) {
  for (const auto recipe : {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor}) {
    BenchMoeLayer layer(shape_, {.recipe = recipe}, DeviceKind::cpu, pool_);
    layer.fill(s_, bench_route(shape_, {.kind = BenchRouting::Kind::zipf}));
    layer.quantise_weights(s_);
    layer.clear(s_);
    layer.forward_router(s_);
    layer.backward_router(s_);
    const MoeBounds bounds = MoeBounds::of(recipe);
    BenchLine line{.name = "moe"};
    check_->y(s_, line, bounds, layer.y_TD);
    check_->dx(s_, line, bounds, layer.dx_TD, /*with_router=*/true);
    check_->dw(s_, line, bounds, layer.dw1_e2FD(), layer.dw2_eDF(), 1);
    expect_wrong("expected y within", [&] { check_->y(s_, line, bounds_, layer.y_TD); });
    expect_wrong("expected dx within", [&] { check_->dx(s_, line, bounds_, layer.dx_TD, true); });
    expect_wrong("expected dw1 within", [&] { check_->dw(s_, line, bounds_, layer.dw1_e2FD(), layer.dw2_eDF(), 1); });
    for (const float factor : {0.0f, 1.35f}) {
      const std::vector<bf16> right(layer.y_TD.ptr<bf16>(), layer.y_TD.ptr<bf16>() + layer.y_TD.numel());
      scale<bf16>(layer.y_TD, factor);
      expect_wrong("expected y within", [&] { check_->y(s_, line, bounds, layer.y_TD); });
      std::copy(right.begin(), right.end(), layer.y_TD.ptr<bf16>());
    }
  }
}

// Layers whose tokens choose two experts or eight, with the widths of models divided by 16 or 32.
TEST(BenchMoeLayer, ShapesOfModelsPassQuantised) {
  for (const auto& [shape, divisor] : {std::pair{"mixtral-8x7b", 32}, {"olmoe", 16}, {"deepseek-v3-8-local", 32}}) {
    for (const auto recipe : {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor}) {
      const BenchReport report =
          bench_moe_layer({.threads = 2, .runs = 1, .scale = 1.0 / divisor, .shape = shape, .operands = recipe});
      EXPECT_EQ(report.lines.size(), 8u) << shape;
    }
  }
}

// Bounds above a third would not tell a result without one of eight experts.
TEST(BenchMoeBounds, AreBelowAThird) {
  for (const auto recipe : {PrecisionRecipe::none, PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor}) {
    const MoeBounds b = MoeBounds::of(recipe);
    for (const double bound : {b.y, b.dx, b.dx_of_logits, b.dw1, b.dw2}) {
      EXPECT_GE(bound, kBf16Tolerance) << name_of(recipe);
      EXPECT_LT(bound, 1.0 / 3) << name_of(recipe);
    }
  }
  EXPECT_NEAR(MoeBounds::of(PrecisionRecipe::fp8_block).dx, 0.1369, 5e-4);
  EXPECT_NEAR(MoeBounds::of(PrecisionRecipe::fp8_tensor).dx, 0.1857, 5e-4);
}

// Nearly all tokens choose the same experts, with logits that differ widely.
TEST(BenchMoeLayer, VeryUnevenRoutingPassesTheCheck) {
  bench_moe_layer(
      {.threads = 1, .runs = 1, .scale = 1.0 / 16, .routing = {.kind = BenchRouting::Kind::zipf, .exponent = 50}});
}

}  // namespace
}  // namespace moebius
