#include "ops/qk_clip/qk_clip.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "io/testing.h"
#include "ops/cpu/testing.h"

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
TEST(QkClip, ShardsHaveTheBitsOfTheWhole) {
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

// f32 weights, and bf16 ones with masters, with remainders and with stochastic rounding.
TEST(QkClip, HasTheSameBitsOnEveryDevice) {
  using testing::Array;
  constexpr int64_t kCols = 300, kHeads = 4, n = 3 * kCols * kHeads, first = 130, owned = n - 2 * first;
  const auto clipped = [&](Stream& s, int form) {
    Array w = Array::normal({owned}, form == 0 ? DType::f32 : DType::bf16, 1),
          master = Array::normal({owned}, DType::f32, 2),
          max = Array::of({kHeads}, DType::f32, {3, 1, std::nan(""), 5}), one = Array::of({1}, DType::f32, {1}),
          lr_and_step = Array::of({2}, DType::f64, {0.1, 7});
    std::vector<unsigned char> low(2 * owned, 9);
    testing::SharedBytes remainder(2 * owned);
    std::memcpy(remainder.data(), low.data(), low.size());
    UpdatedTensor t{.param_n = w.tensor()};
    if (form < 2) t.master_n = form == 0 ? w.tensor() : master.tensor();
    if (form == 2) t.remainder_n = {.data = remainder.data(), .shape = {owned}, .dtype = DType::u16};
    t.draws = {.seed = 3, .key = 5, .begin = first, .run = n, .stride = n};
    qk_clip(s, {.tensor = t,
                .first = first,
                .cols = kCols,
                .head_rows = 3,
                .root_rows = 1,
                .whole_rows = 1,
                .max_logit_H = max.tensor(),
                .threshold = kThreshold,
                .scale_1 = one.tensor(),
                .lr_and_step_2 = lr_and_step.tensor()});
    std::vector<unsigned char> all = w.bytes();
    for (const auto& more :
         {master.bytes(), std::vector<unsigned char>(remainder.data(), remainder.data() + 2 * owned)})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  Rig cpu;
  for (const int form : {0, 1, 2, 3}) {
    const std::vector<unsigned char> want = clipped(cpu.s, form);
    testing::on_each_device([&](Stream& s) { EXPECT_EQ(clipped(s, form), want) << form; });
  }
}

TEST(MaxOverRanks, IsTheSameOnEveryDevice) {
  using testing::Array;
  testing::on_each_device([](Stream& s) {
    Array x = Array::of({3, 2}, DType::f32, {1, 5, 3, 2, -1, 4}), max = Array::poisoned({2}, DType::f32);
    max_over_ranks(s, {.max_N = max.tensor(), .x_RN = x.tensor()});
    EXPECT_EQ(max.values(), (testing::Values{3, 5}));
  });
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
