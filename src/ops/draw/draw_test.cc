#include "ops/draw/draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t rows, vocab, num_ids;
  double temperature;
};

std::vector<Case> cases() {
  const std::vector<std::array<int64_t, 3>> sizes{{0, 5, 5},       {1, 1, 1},       {3, 7, 4},         {32, 33, 33},
                                                  {2, 1025, 1024}, {5, 3000, 2999}, {1, 33001, 33001}, {3, 9000, 8192}};
  std::vector<Case> all;
  for (const double temperature : {0.0, 0.2, 1.0, 40.0}) {
    for (const auto& [rows, vocab, num_ids] : sizes) all.push_back({rows, vocab, num_ids, temperature});
  }
  return all;
}

struct Draws {
  Values ids, read, pos;
  bool operator==(const Draws&) const = default;
};

constexpr uint64_t kSeed = 11;

int32_t position_of(int64_t row) { return static_cast<int32_t>(3 * row + 4); }

Draws draw(Stream& s, Array logits, int64_t num_ids, double temperature) {
  const int64_t N = logits.tensor().dim(0);
  Values at;
  for (int64_t n = 0; n < N; ++n) at.push_back(position_of(n));
  Array id = Array::poisoned({N}, DType::i32), read = Array::of({2, N}, DType::i32, Values(2 * N, -7.0)),
        pos = Array::of({N}, DType::i32, at), rule({int64_t{sizeof(DrawRule)}}, DType::u8);
  const DrawRule how = draw_rule(temperature, num_ids, kSeed);
  std::memcpy(rule.tensor().data, &how, sizeof how);
  draw_tokens(s, {.id_N = id.tensor(),
                  .read_2N = read.tensor(),
                  .pos_N = pos.tensor(),
                  .logits_NV = logits.tensor(),
                  .rule = rule.tensor()});
  return {id.values(), read.values(), pos.values()};
}

class DrawTest : public testing::DeviceTest<Case> {
 protected:
  Array logits_ = Array::normal({c().rows, c().vocab}, DType::f32, 1, 3);
};
INSTANTIATE_TEST_SUITE_P(Shapes, DrawTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// The sums of probabilities in double, up to an id and with it, enclose the uniform number. The masses are integers of
// 40 bits, each of which is less than 1 too small, so sums differ by 2^-40 an id of the largest probability.
TEST_P(DrawTest, TheUniformNumberIsInTheShareOfTheId) {
  const auto [rows, vocab, num_ids, temperature] = c();
  const Draws got = draw(s_, logits_, num_ids, temperature);
  const Values x = logits_.values();
  for (int64_t n = 0; n < rows; ++n) {
    const double* row = x.data() + n * vocab;
    const auto id = static_cast<int64_t>(got.ids[n]);
    ASSERT_TRUE(0 <= id && id < num_ids) << id;
    const double top = *std::max_element(row, row + num_ids);
    if (temperature == 0) {
      EXPECT_EQ(id, std::find(row, row + num_ids, top) - row);
      continue;
    }
    double total = 0, below = 0, with = 0;
    for (int64_t i = 0; i < num_ids; ++i) {
      const double mass = std::exp((row[i] - top) / temperature);
      total += mass;
      if (i < id) below += mass;
      if (i <= id) with += mass;
    }
    const double u = Rng(kSeed, RngSite::sampling).uniform(static_cast<uint64_t>(position_of(n) + 1));
    const double error = 0x1p-39 * static_cast<double>(num_ids);
    EXPECT_LE(below, u * total + error) << n;
    EXPECT_GE(with, u * total - error) << n;
  }
}

// Masses have the same bits on both devices, so all draws are equal.
TEST_P(DrawTest, EveryDeviceAndTheHostDrawTheSame) {
  const auto [rows, vocab, num_ids, temperature] = c();
  const Draws got = draw(s_, logits_, num_ids, temperature);
  Draws want{{}, Values(2 * rows, -7.0), {}};
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t next = position_of(n) + 1;
    const std::span row(logits_.tensor().ptr<float>() + n * vocab, static_cast<size_t>(num_ids));
    want.ids.push_back(
        draw_token(row, temperature, Rng(kSeed, RngSite::sampling).uniform(static_cast<uint64_t>(next))));
    want.read[position_of(n) % 2 * rows + n] = want.ids.back();
    want.pos.push_back(static_cast<double>(next));
  }
  EXPECT_EQ(got, want);
}

TEST(Draw, TiesGoToTheLowerIdAndWhatIsNotFiniteIsReported) {
  testing::on_each_device([](Stream& s) {
    const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
    const Array logits = Array::of({5, 3}, DType::f32, {1, 3, 3, nan, 0, 1, 0, inf, 1, -inf, 0, 1, -0.0, 0.0, -1});
    for (const double temperature : {0.0, 1.0}) {
      const Draws got = draw(s, logits, 3, temperature);
      for (const int64_t n : {1, 2, 3}) {
        EXPECT_EQ(got.ids[n], 0) << n;
        EXPECT_EQ(got.read[position_of(n) % 2 * 5 + n], -1) << n;
      }
      if (temperature > 0) continue;
      EXPECT_EQ(got.ids[0], 1);
      EXPECT_EQ(got.ids[4], 0);
    }
    EXPECT_EQ(draw(s, Array::of({1, 3}, DType::f32, {1, 2, nan}), 2, 0).ids, Values{1}) << "past the last id";
    Values many(9000, 0.0);  // several blocks of a GPU read them
    EXPECT_EQ(draw(s, Array::of({1, 9000}, DType::f32, many), 9000, 0).ids, Values{0});
    many[8990] = nan;
    EXPECT_EQ(draw(s, Array::of({1, 9000}, DType::f32, many), 9000, 1).read[position_of(0) % 2], -1);
  });
}

TEST(Draw, FrequenciesFollowTheProbabilities) {
  const std::vector<float> logits{std::log(0.5f), std::log(0.2f), std::log(0.3f)};
  std::vector<int> count(3);
  const int n = 20000;
  for (int i = 0; i < n; ++i) ++count[draw_token(logits, 1.0, (static_cast<float>(i) + 0.5f) / n)];
  EXPECT_NEAR(count[0], 0.5 * n, 1);
  EXPECT_NEAR(count[1], 0.2 * n, 1);
  EXPECT_NEAR(count[2], 0.3 * n, 1);
}

TEST(Draw, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::null, pool);
  const auto with = [&](Shape logits, Shape id, Shape read) {
    return testing::error_of([&] {
      draw_tokens(s, {.id_N = testing::null_tensor(id, DType::i32),
                      .read_2N = testing::null_tensor(read, DType::i32),
                      .pos_N = testing::null_tensor(id, DType::i32),
                      .logits_NV = testing::null_tensor(logits),
                      .rule = testing::null_tensor({int64_t{sizeof(DrawRule)}}, DType::u8)});
    });
  };
  EXPECT_EQ(with({2, 5}, {2}, {2, 2}), "no error");
  EXPECT_EQ(with({2, 0}, {2}, {2, 2}), "draw_tokens: logits must be f32 [N, V] with V above 0; got f32[2, 0]");
  EXPECT_EQ(with({2, 5}, {3}, {2, 2}), "draw_tokens: id must be i32[2]; got i32[3]");
  EXPECT_EQ(with({2, 5}, {2}, {2, 3}), "draw_tokens: read must be i32[2, 2]; got i32[2, 3]");
}

}  // namespace
}  // namespace moebius
