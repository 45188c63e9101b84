// A vocabulary in blocks: the merged results of the blocks equal the result of the whole.
#include "ops/vocab/vocab_blocks.h"

#include "ops/cpu/testing.h"
#include "ops/vocab/vocab.h"
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
    for (const auto& [tokens, vocab, width] : std::vector<std::array<int64_t, 3>>{
             {0, 5, 3}, {1, 3, 1}, {7, 33, 5}, {70, 48, 16}, {131, 5001, 8}, {5, 40000, 4}})
      all.push_back({tokens, vocab, width, dtype});
  }
  return all;
}

// Three blocks; the first two are equal, and the last one has the rest.
struct Block {
  int64_t first, end;
};
std::vector<Block> blocks_of(int64_t vocab) {
  const int64_t size = vocab / 3;
  return {{0, size}, {size, 2 * size}, {2 * size, vocab}};
}

class VocabBlocksTest : public testing::DeviceTest<Case> {
 protected:
  VocabBlocksTest() {
    for (int64_t t = 0; t < c_.tokens; ++t) {
      weight_.push_back(t % 3 == 1 ? 0 : 0.5 + static_cast<double>(t % 2));
      target_.push_back(weight_[t] == 0 ? -100 : static_cast<int32_t>(t * t * 7 % c_.vocab));
    }
  }
  const Case c_ = c();
  Values weight_;
  std::vector<int32_t> target_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, VocabBlocksTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(VocabBlocksTest, LossAndGradientsEqualTheReference) {
  const auto [tokens, vocab, width, dtype] = c_;
  Array x = Array::normal({tokens, width}, dtype, 1), w = Array::normal({vocab, width}, dtype, 2),
        dw = Array::normal({vocab, width}, DType::f32, 3), ids = Array::of_ints({tokens}, target_),
        weights = Array::of({tokens}, DType::f32, weight_), scale = Array::of({1}, DType::f32, {0.25});
  const ref::LmLoss want =
      ref::lm_loss(x.values(), w.values(), Values(target_.begin(), target_.end()), weight_, width, 0.25);
  Values want_dw = dw.values(), dx_sum(tokens * width);
  for (size_t i = 0; i < want_dw.size(); ++i) want_dw[i] += want.dw[i];

  Array stats = Array::poisoned({3, tokens, 3}, DType::f32);
  std::vector<Array> logits;
  for (const auto& [first, end] : blocks_of(vocab)) {
    const auto b = static_cast<int64_t>(logits.size());
    logits.push_back(Array::poisoned({tokens, end - first}, DType::f32));
    lm_logits_block(s_, {.logits_CV = logits.back().tensor(),
                         .stats_C3 = stats.tensor().rows(b, b + 1).view({tokens, 3}),
                         .x_CD = x.tensor(),
                         .w_VD = w.tensor().rows(first, end),
                         .target_C = ids.tensor(),
                         .first = first});
  }
  const double eps32 = testing::epsilon(DType::f32),
               error = 4 * eps32 * (static_cast<double>(width) + std::sqrt(static_cast<double>(vocab)));
  for (size_t b = 0; b < 3; ++b) {
    const auto [first, end] = blocks_of(vocab)[b];
    Array loss = Array::poisoned({tokens}, DType::f32), loss_alone = loss, dx = Array::poisoned({tokens, width}, dtype),
          dlogits = Array::poisoned({tokens, end - first}, dtype);
    LmLossBlock a{.loss_C = loss_alone.tensor(),
                  .logits_CV = logits[b].tensor(),
                  .stats_nC3 = stats.tensor(),
                  .x_CD = x.tensor(),
                  .w_VD = w.tensor().rows(first, end),
                  .target_C = ids.tensor(),
                  .weight_C = weights.tensor(),
                  .scale = 0.25f,
                  .first = first};
    lm_loss_block(s_, a);
    a.loss_C = loss.tensor(), a.dx_CD = dx.tensor(), a.dw_VD = dw.tensor().rows(first, end);
    a.dlogits_CV = dlogits.tensor();
    if (b == 1) a.scale_1 = scale.tensor(), a.scale = 99;
    lm_loss_block(s_, a);
    testing::expect_close("loss", loss.values(), want.loss, error, error);
    EXPECT_EQ(loss_alone.bytes(), loss.bytes());
    const Values part = dx.values();
    for (size_t i = 0; i < part.size(); ++i) dx_sum[i] += part[i];
  }
  // The blocks' shares of dx are each rounded; they are larger than their sum by no more
  // than their number.
  const double eps = testing::epsilon(dtype);
  testing::expect_close("dx", dx_sum, want.dx, 6 * eps + error, error);
  testing::expect_close("dw", dw.values(), want_dw, eps + error, error);
}

// The other blocks determine the loss.
TEST(VocabBlocks, ABlockWhoseLogitsAreAllMinusInfinityAddsNothing) {
  testing::on_each_device([](Stream& s) {
    const double huge = std::numeric_limits<float>::max();
    Array x = Array::of({1, 2}, DType::f32, {huge, 1}), w = Array::of({2, 2}, DType::f32, {-huge, 0, -huge, 0}),
          ids = Array::of_ints({1}, {7}), logits({1, 2}, DType::f32), stats = Array::poisoned({1, 3}, DType::f32);
    lm_logits_block(s, {.logits_CV = logits.tensor(),
                        .stats_C3 = stats.tensor(),
                        .x_CD = x.tensor(),
                        .w_VD = w.tensor(),
                        .target_C = ids.tensor(),
                        .first = 0});
    EXPECT_EQ(stats.values(), (Values{-std::numeric_limits<double>::infinity(), 0, 0}));
  });
}

TEST_P(VocabBlocksTest, EmbeddingIsTheSumOfItsBlocks) {
  const auto [tokens, vocab, width, dtype] = c_;
  std::vector<int32_t> token(tokens);
  for (int64_t t = 0; t < tokens; ++t) token[t] = static_cast<int32_t>(t * t * 7 % vocab);
  Array ids = Array::of_ints({tokens}, token), w = Array::normal({vocab, width}, dtype, 1),
        dx = Array::normal({tokens, width}, dtype, 2), dw = Array::normal({vocab, width}, DType::f32, 3);
  const Values from = w.values(), d = dx.values();
  Values want_dw = dw.values();
  for (int64_t i = 0; i < tokens * width; ++i) want_dw[token[i / width] * width + i % width] += d[i];
  for (const auto& [first, end] : blocks_of(vocab)) {
    Array x = Array::poisoned({tokens, width}, dtype);
    embedding_fwd(s_, {.x_TD = x.tensor(),
                       .token_T = ids.tensor(),
                       .w_VD = w.tensor().rows(first, end),
                       .is_block = true,
                       .first = first});
    EmbeddingBwd bwd{.dw_VD = dw.tensor().rows(first, end),
                     .dx_TD = dx.tensor(),
                     .token_T = ids.tensor(),
                     .is_block = true,
                     .first = first};
    Array scratch({EmbeddingBwd::scratch_bytes(bwd, s_)}, DType::u8);
    bwd.scratch = scratch.tensor();
    embedding_bwd(s_, bwd);
    synchronize(s_);
    Values want(tokens * width);
    for (int64_t i = 0; i < tokens * width; ++i) {
      const int32_t id = token[i / width];
      if (first <= id && id < end) want[i] = from[id * width + i % width];
    }
    EXPECT_EQ(x.values(), want);
  }
  testing::expect_close("dw", dw.values(), want_dw,
                        testing::epsilon(DType::f32) * std::sqrt(static_cast<double>(tokens) + 1), 1e-7);
}

TEST(VocabBlocks, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array x = Array::normal({70, 16}, DType::bf16, 1), w = Array::normal({33, 16}, DType::bf16, 2),
          target = Array::of_ints({70}, std::vector<int32_t>(70, 40)),
          weight = Array::of({70}, DType::f32, Values(70, 1.0));
    Array logits({70, 33}, DType::f32), stats({1, 70, 3}, DType::f32), loss({70}, DType::f32),
        dx = x, dlogits({70, 33}, DType::bf16), dw = Array::normal({33, 16}, DType::f32, 3);
    lm_logits_block(s, {.logits_CV = logits.tensor(),
                        .stats_C3 = stats.tensor().view({70, 3}),
                        .x_CD = x.tensor(),
                        .w_VD = w.tensor(),
                        .target_C = target.tensor(),
                        .first = 20});
    lm_loss_block(s, {.loss_C = loss.tensor(),
                      .dx_CD = dx.tensor(),
                      .dw_VD = dw.tensor(),
                      .dlogits_CV = dlogits.tensor(),
                      .logits_CV = logits.tensor(),
                      .stats_nC3 = stats.tensor(),
                      .x_CD = x.tensor(),
                      .w_VD = w.tensor(),
                      .target_C = target.tensor(),
                      .weight_C = weight.tensor(),
                      .first = 20});
    return std::vector<Array>{stats, loss, dx, dw};
  });
}

}  // namespace
}  // namespace moebius
