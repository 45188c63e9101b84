#include "ops/qk_clip/qk_clip.h"

#include <gtest/gtest.h>

#include <cmath>

#include "io/testing.h"

namespace moebius {
namespace {

constexpr float kThreshold = 2;

struct Rig {
  ThreadPool pool{2};
  Stream s{DeviceKind::cpu, pool};
  float one = 1;
  Tensor scale() { return tensor_of(&one, {1}); }
};

// Four query heads of two key heads: the first key head is above the threshold by its second query head.
std::vector<float> logits() { return {1, 8, 2, -3}; }
constexpr float kGamma = 0.25f;

std::vector<float> ones(int64_t n) { return std::vector<float>(static_cast<size_t>(n), 1.0f); }

TEST(QkClip, ScalesQueriesAndKeysOfAGroup) {
  Rig rig;
  std::vector<float> max = logits(), q = ones(4 * 3 * 2), k = ones(2 * 3 * 2);
  const auto clip = [&](std::vector<float>& w, bool of_keys) {
    qk_clip(rig.s, {.tensor = {.param_n = tensor_of(w.data(), {std::ssize(w)})},
                    .cols = 2,
                    .head_rows = 3,
                    .root_rows = 3,
                    .max_logit_H = tensor_of(max.data(), {4}),
                    .kv_group = 2,
                    .of_keys = of_keys,
                    .threshold = kThreshold,
                    .scale_1 = rig.scale()});
  };
  clip(q, false);
  clip(k, true);
  for (int64_t i = 0; i < std::ssize(q); ++i) EXPECT_EQ(q[i], i / 6 < 2 ? std::sqrt(kGamma) : 1) << i;
  for (int64_t i = 0; i < std::ssize(k); ++i) EXPECT_EQ(k[i], i / 6 < 1 ? std::sqrt(kGamma) : 1) << i;
}

// Latent attention: rows without rotation, rows with it, and rows of values.
TEST(QkClip, ScalesRotatedQueriesByAllOfGamma) {
  Rig rig;
  std::vector<float> max{8, 1}, w = ones(2 * 4 * 3);
  qk_clip(rig.s, {.tensor = {.param_n = tensor_of(w.data(), {24})},
                  .cols = 3,
                  .head_rows = 4,
                  .root_rows = 2,
                  .whole_rows = 1,
                  .max_logit_H = tensor_of(max.data(), {2}),
                  .threshold = kThreshold,
                  .scale_1 = rig.scale()});
  for (int64_t i = 0; i < 24; ++i) {
    const int64_t row = i / 3;
    EXPECT_EQ(w[i], row < 2 ? std::sqrt(kGamma) : row == 2 ? kGamma : 1) << i;
  }
}

// A rank owns any range of elements, and the bits are those of the whole, in each form of masters.
TEST(QkClip, SharesAreTheWhole) {
  Rig rig;
  constexpr int64_t kCols = 300, kRows = 8, n = kCols * kRows;
  std::vector<float> max{3, 1, 5, 2.5f};
  const auto weights = [&] {
    std::vector<bf16> w(n);
    for (int64_t i = 0; i < n; ++i) w[i] = to_bf16(static_cast<float>(i % 97) / 31 - 1.5f);
    return w;
  };
  enum class Form { master, remainder, stochastic };
  for (const Form form : {Form::master, Form::remainder, Form::stochastic}) {
    const auto clipped = [&](const std::vector<int64_t>& cuts) {
      std::vector<bf16> w = weights();
      std::vector<float> master(n);
      std::vector<uint16_t> remainder(n, 77);
      for (int64_t i = 0; i < n; ++i) master[i] = to_f32(w[i]) * 1.001f;
      for (size_t c = 0; c + 1 < cuts.size(); ++c) {
        const auto part = [&](const Tensor& t) { return t.rows(cuts[c], cuts[c + 1]); };
        Tensor remainder_n = tensor_of(w.data(), {n});
        remainder_n.data = remainder.data();
        remainder_n.dtype = DType::u16;
        UpdatedTensor t{.param_n = part(tensor_of(w.data(), {n}))};
        if (form == Form::master) t.master_n = part(tensor_of(master.data(), {n}));
        if (form == Form::remainder) t.remainder_n = part(remainder_n);
        t.draws = {.seed = 3, .key = 5, .begin = cuts[c], .run = n, .stride = n};
        qk_clip(rig.s, {.tensor = t,
                        .first = cuts[c],
                        .cols = kCols,
                        .head_rows = 2,
                        .root_rows = 1,
                        .whole_rows = 1,
                        .max_logit_H = tensor_of(max.data(), {4}),
                        .threshold = kThreshold,
                        .scale_1 = rig.scale()});
      }
      std::vector<float> all(master);
      for (const bf16 x : w) all.push_back(to_f32(x));
      all.insert(all.end(), remainder.begin(), remainder.end());
      return all;
    };
    const std::vector<float> whole = clipped({0, n});
    EXPECT_EQ(clipped({0, 7, 7, 1025, n}), whole);
    EXPECT_EQ(whole[n + 2 * kCols], to_f32(weights()[2 * kCols])) << "the second head stays";
    EXPECT_NE(whole[n + 1], to_f32(weights()[1]));
  }
}

TEST(QkClip, DoesNothingWithoutAnUpdate) {
  Rig rig;
  rig.one = std::nanf("");
  std::vector<float> max{100}, w = ones(6);
  const QkClip clip{.tensor = {.param_n = tensor_of(w.data(), {6})},
                    .cols = 2,
                    .head_rows = 3,
                    .root_rows = 3,
                    .max_logit_H = tensor_of(max.data(), {1}),
                    .threshold = kThreshold,
                    .scale_1 = rig.scale()};
  qk_clip(rig.s, clip);
  EXPECT_EQ(w, ones(6));
  QkClip beyond = clip;
  beyond.first = 1;
  expect_error(ErrorKind::usage,
               "qk_clip: expected elements of a matrix of 1 heads of 3 rows and 2 columns; got [1, 7)",
               [&] { qk_clip(rig.s, beyond); });
}

TEST(MaxOverRanks, IsTheLargestOfAllRanks) {
  Rig rig;
  std::vector<float> x{1, 5, 3, 2, -1, 4}, max(2);
  max_over_ranks(rig.s, {.max_N = tensor_of(max.data(), {2}), .x_RN = tensor_of(x.data(), {3, 2})});
  EXPECT_EQ(max, (std::vector<float>{3, 5}));
}

}  // namespace
}  // namespace moebius
