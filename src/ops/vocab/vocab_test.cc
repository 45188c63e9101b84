#include "ops/vocab/vocab.h"

#include "device/gpu_limits.h"
#include "ops/cpu/testing.h"
#include "ops/vocab/vocab_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t tokens, vocab, width;
  DType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [tokens, vocab, width] : std::vector<std::array<int64_t, 3>>{{0, 5, 3},
                                                                                  {1, 1, 1},
                                                                                  {7, 33, 5},
                                                                                  {1050, 9, 6},
                                                                                  {40, 5000, 16},
                                                                                  {2, 70001, 3},
                                                                                  {1050, 16, 6},
                                                                                  {70, 1004, 6},
                                                                                  {40, 151936, 2},
                                                                                  {2, 200000, 2},
                                                                                  {2, 300000, 2}}) {
      all.push_back({tokens, vocab, width, dtype});
    }
  }
  return all;
}

std::vector<int32_t> some_tokens(int64_t tokens, int64_t vocab) {
  std::vector<int32_t> v(tokens);
  for (int64_t t = 0; t < tokens; ++t) v[t] = static_cast<int32_t>(t * t * 7 % vocab);
  return v;
}

class VocabTest : public testing::DeviceTest<Case> {
 protected:
  void expect_loss_and_gradients();
};
INSTANTIATE_TEST_SUITE_P(Shapes, VocabTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// Runs it with the scratch that it needs.
void run_embedding_bwd(Stream& s, EmbeddingBwd a) {
  Array scratch({EmbeddingBwd::scratch_bytes(a, s)}, DType::u8);
  a.scratch = scratch.tensor();
  embedding_bwd(s, a);
  synchronize(s);
}

TEST_P(VocabTest, EmbeddingGathersAndScatters) {
  const auto [tokens, vocab, width, dtype] = c();
  const std::vector<int32_t> token = some_tokens(tokens, vocab);
  Array ids = Array::of_ints({tokens}, token), w = Array::normal({vocab, width}, dtype, 1),
        x = Array::poisoned({tokens, width}, dtype);
  Array dx = Array::normal({tokens, width}, dtype, 2), dw = Array::normal({vocab, width}, DType::f32, 3);
  Values want_x(tokens * width), want_dw = dw.values();
  const Values from = w.values(), d = dx.values();
  for (int64_t i = 0; i < tokens * width; ++i) {
    const int64_t at = token[i / width] * width + i % width;
    want_x[i] = from[at];
    want_dw[at] += d[i];
  }
  embedding_fwd(s_, {.x_TD = x.tensor(), .token_T = ids.tensor(), .w_VD = w.tensor()});
  run_embedding_bwd(s_, {.dw_VD = dw.tensor(), .dx_TD = dx.tensor(), .token_T = ids.tensor()});
  EXPECT_EQ(x.values(), want_x);
  testing::expect_close("dw", dw.values(), want_dw, testing::epsilon(DType::f32) * std::sqrt(tokens + 1.0), 1e-7);
}

// A token of weight 0 has a target that is no token at all.
void VocabTest::expect_loss_and_gradients() {
  const auto [tokens, vocab, width, dtype] = c();
  std::vector<int32_t> target = some_tokens(tokens, vocab);
  Values weight(tokens);
  for (int64_t t = 0; t < tokens; ++t) weight[t] = t % 3 == 1 ? 0 : 0.5 + t % 2;
  for (int64_t t = 0; t < tokens; ++t) target[t] = weight[t] == 0 ? -100 : target[t];
  Array x = Array::normal({tokens, width}, dtype, 1), w = Array::normal({vocab, width}, dtype, 2),
        ids = Array::of_ints({tokens}, target);
  Array weights = Array::of({tokens}, DType::f32, weight), dw = Array::normal({vocab, width}, DType::f32, 3);
  const int64_t chunk = LmLoss::chunk(tokens, vocab, s_);
  Array loss = Array::poisoned({tokens}, DType::f32), loss_alone = loss, dx = Array::poisoned({tokens, width}, dtype);
  Array logits = Array::poisoned({chunk, vocab}, DType::f32), dlogits = Array::poisoned({chunk, vocab}, dtype);
  const ref::LmLoss want =
      ref::lm_loss(x.values(), w.values(), Values(target.begin(), target.end()), weight, width, 0.25);
  Values want_dw = dw.values();
  for (size_t i = 0; i < want_dw.size(); ++i) want_dw[i] += want.dw[i];
  Array scale = Array::of({1}, DType::f32, {0.25});
  lm_loss(s_, {.loss_T = loss.tensor(),
               .dx_TD = dx.tensor(),
               .dw_VD = dw.tensor(),
               .logits_CV = logits.tensor(),
               .dlogits_CV = dlogits.tensor(),
               .x_TD = x.tensor(),
               .w_VD = w.tensor(),
               .target_T = ids.tensor(),
               .weight_T = weights.tensor(),
               .scale_1 = tokens % 2 ? scale.tensor() : Tensor{},
               .scale = tokens % 2 ? 99.0f : 0.25f});
  lm_loss(s_, {.loss_T = loss_alone.tensor(),
               .logits_CV = logits.tensor(),
               .x_TD = x.tensor(),
               .w_VD = w.tensor(),
               .target_T = ids.tensor(),
               .weight_T = weights.tensor()});
  // Logits are sums of D products in f32, of magnitude sqrt(D); the exponentials and their sum add
  // a few epsilon.
  const double eps32 = testing::epsilon(DType::f32), logit_error = 4 * eps32 * (width + std::sqrt(vocab));
  testing::expect_close("loss", loss.values(), want.loss, logit_error, logit_error);
  EXPECT_EQ(loss_alone.bytes(), loss.bytes());
  // dlogits is rounded to the dtype, and so is dx.
  testing::expect_close("dx", dx.values(), want.dx, 2 * testing::epsilon(dtype) + logit_error, logit_error);
  testing::expect_close("dw", dw.values(), want_dw, testing::epsilon(dtype) + logit_error, logit_error);
}

TEST_P(VocabTest, LossAndGradientsEqualTheReference) { expect_loss_and_gradients(); }

// A block owns a row where a GPU has no clusters.
TEST_P(VocabTest, LossAndGradientsEqualTheReferenceOnOtherGpus) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "the limits are a GPU's";
  const GpuLimitsScope other(s_, documented_gpu_limits(8, 0, 108));
  expect_loss_and_gradients();
}

TEST(LmLoss, ReferenceGradientsEqualFiniteDifferences) {
  const Values x = Array::normal({3, 4}, DType::f32, 1).values(), w = Array::normal({5, 4}, DType::f32, 2).values(),
               target = {4, 0, 2}, weight = {1, 0, 0.5};
  const ref::LmLoss at = ref::lm_loss(x, w, target, weight, 4, 0.5);
  const auto total = [&](const Values& at_x, const Values& at_w) {
    double sum = 0;
    for (const double l : ref::lm_loss(at_x, at_w, target, weight, 4, 0.5).loss) sum += 0.5 * l;
    return sum;
  };
  testing::expect_gradient(
      "dx", [&](const Values& v) { return total(v, w); }, x, at.dx);
  testing::expect_gradient(
      "dw", [&](const Values& v) { return total(x, v); }, w, at.dw);
}

TEST(LmLoss, LargeLogitsDoNotOverflow) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::of({1, 1}, DType::f32, {1}), w = Array::of({2, 1}, DType::f32, {1000, -1000}),
          target = Array::of_ints({1}, {1});
    Array weight = Array::of({1}, DType::f32, {1}), loss({1}, DType::f32), logits({1, 2}, DType::f32);
    lm_loss(s, {.loss_T = loss.tensor(),
                .logits_CV = logits.tensor(),
                .x_TD = x.tensor(),
                .w_VD = w.tensor(),
                .target_T = target.tensor(),
                .weight_T = weight.tensor()});
    EXPECT_EQ(loss.values()[0], 2000);
  });
}

TEST(Vocab, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array ids = Array::of_ints({300}, some_tokens(300, 17)), w = Array::normal({17, 300}, DType::bf16, 1),
          x({300, 300}, DType::bf16);
    Array dx({300, 300}, DType::bf16), dw({17, 300}, DType::f32), loss({300}, DType::f32),
        logits({300, 17}, DType::f32), dlogits({300, 17}, DType::bf16);
    Array weight = Array::normal({300}, DType::f32, 2);
    embedding_fwd(s, {.x_TD = x.tensor(), .token_T = ids.tensor(), .w_VD = w.tensor()});
    lm_loss(s, {.loss_T = loss.tensor(),
                .dx_TD = dx.tensor(),
                .dw_VD = dw.tensor(),
                .logits_CV = logits.tensor(),
                .dlogits_CV = dlogits.tensor(),
                .x_TD = x.tensor(),
                .w_VD = w.tensor(),
                .target_T = ids.tensor(),
                .weight_T = weight.tensor()});
    run_embedding_bwd(s, {.dw_VD = dw.tensor(), .dx_TD = dx.tensor(), .token_T = ids.tensor()});
    return std::vector<Array>{x, loss, dx, dw};
  });
}

TEST(Vocab, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array w({5, 3}, DType::f32), x({2, 3}, DType::f32), narrow({2, 2}, DType::f32),
      ids = Array::of_ints({2}, {1, 5}), loss({2}, DType::f32), logits({2, 4}, DType::f32);
  EXPECT_EQ(testing::error_of(
                [&] { embedding_fwd(s, {.x_TD = narrow.tensor(), .token_T = ids.tensor(), .w_VD = w.tensor()}); }),
            "embedding_fwd: x must be f32[2, 3]; got f32[2, 2]");
  EXPECT_EQ(testing::error_of([&] { embedding_bwd(s, {.dw_VD = w.tensor(), .dx_TD = ids.tensor()}); }),
            "embedding_bwd: dx must be an f32 or bf16 matrix; got i32[2]");
  EXPECT_EQ(testing::error_of([&] {
              lm_loss(s, {.loss_T = loss.tensor(),
                          .logits_CV = logits.tensor(),
                          .x_TD = x.tensor(),
                          .w_VD = w.tensor(),
                          .target_T = ids.tensor(),
                          .weight_T = loss.tensor()});
            }),
            "lm_loss: logits must be f32[2, 5]; got f32[2, 4]");
  EXPECT_THROW(embedding_fwd(s, {.x_TD = x.tensor(), .token_T = ids.tensor(), .w_VD = w.tensor()}), Error);
}

TEST(Vocab, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({3, 4}), w = testing::null_tensor({5, 4}),
                 ids = testing::null_tensor({3}, DType::i32), t = testing::null_tensor({3});
    const Tensor logits = testing::null_tensor({3, 5});
    embedding_fwd(s, {.x_TD = x, .token_T = ids, .w_VD = w});
    embedding_bwd(s, {.dw_VD = w, .dx_TD = x, .token_T = ids});
    lm_loss(s, {.loss_T = t,
                .dx_TD = x,
                .dw_VD = w,
                .logits_CV = logits,
                .dlogits_CV = logits,
                .x_TD = x,
                .w_VD = w,
                .target_T = ids,
                .weight_T = t});
  });
  EXPECT_EQ(cost.flops, 12 + 6 * 3 * 4 * 5);
}

}  // namespace
}  // namespace moebius
