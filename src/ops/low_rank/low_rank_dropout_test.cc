#include "ops/low_rank/low_rank_dropout.h"

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t width = 8, columns = 8, first_column = 0;  // of the whole matrix, and where its part begins
  bool grouped = false, gather = false, accumulate = false;
  double rate = 0.25;
  DType dtype = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : {Case{}, Case{13, 13}, Case{5, 21, 7}, Case{256, 512, 256, true}, Case{40, 40, 0, true, true},
                   Case{40, 40, 0, true, false, true}, Case{3, 9, 6, true, true, true, 0.9},
                   Case{8, 8, 0, false, false, false, 0}}) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

class LowRankDropoutTest : public testing::DeviceTest<Case> {
 protected:
  static Array ints(const std::vector<int64_t>& values, DType dtype = DType::i32) {
    return Array::of({std::ssize(values)}, dtype, Values(values.begin(), values.end()));
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, LowRankDropoutTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// 11 rows of two experts, the last of them of nobody; 5 tokens.
TEST_P(LowRankDropoutTest, DropsByTokenExpertAndColumn) {
  const Case& k = c();
  constexpr int64_t R = 11, N = 5;
  const std::vector<int64_t> offsets = {0, 4, 10};
  std::vector<int64_t> token;
  for (int64_t r = 0; r < R; ++r) token.push_back((3 * r + 1) % N);
  std::vector<int64_t> index;
  for (int64_t i = 0; i < (k.grouped ? N : R); ++i) index.push_back(1000 + 7 * i);
  Array x = Array::normal({k.gather ? N : R, k.width}, k.dtype, 1), y = Array::normal({R, k.width}, k.dtype, 2);
  Array of_offsets = ints(offsets), of_token = ints(token), of_index = ints(index);
  Array draw({2}, DType::i64);
  const int64_t step = (int64_t{3} << 32) + 17;
  draw.tensor().ptr<int64_t>()[0] = step;
  draw.tensor().ptr<int64_t>()[1] = -1;  // not read
  Values want = y.values();
  const Values from = x.values();
  const Rng rng(99, RngSite::dropout, static_cast<uint64_t>(step), 77);
  const int64_t first_expert = k.grouped ? 3 : 0, experts = k.grouped ? 6 : 1;
  for (int64_t r = 0; r < (k.grouped ? 10 : R); ++r) {
    const int64_t expert = first_expert + (k.grouped && r >= 4 ? 1 : 0);
    const int64_t i = k.gather ? token[r] : r, t = index[k.grouped ? token[r] : r];
    for (int64_t col = 0; col < k.width; ++col) {
      const auto element = static_cast<uint64_t>((t * experts + expert) * k.columns + k.first_column + col);
      const bool keep = rng.bits(element / 2)[element % 2] * 0x1p-32 >= k.rate;
      double& to = want[r * k.width + col];
      to = (k.accumulate ? to : 0) + (keep ? from[i * k.width + col] : 0);
    }
  }
  low_rank_dropout(s_, {.y_RK = y.tensor(),
                        .x_TK = x.tensor(),
                        .draw = {.draw_2 = draw.tensor(),
                                 .index_N = of_index.tensor(),
                                 .seed = 99,
                                 .matrix = 77,
                                 .first_expert = first_expert,
                                 .num_experts = experts,
                                 .first_column = k.first_column,
                                 .num_columns = k.columns,
                                 .rate = k.rate},
                        .gather = k.gather,
                        .accumulate = k.accumulate,
                        .rows = {.offsets_e1 = k.grouped ? of_offsets.tensor() : Tensor{},
                                 .token_R = k.grouped ? of_token.tensor() : Tensor{}}});
  synchronize(s_);
  testing::expect_close("dropped", y.values(), want, k.accumulate ? testing::epsilon(k.dtype) : 0, 0);
}

class RowTokensTest : public testing::DeviceTest<Case> {};
INSTANTIATE_TEST_SUITE_P(Devices, RowTokensTest, ::testing::ValuesIn(testing::on_each_device(std::vector<Case>{{}})));

// Two sequences of 8 tokens over two context ranks: rank 1 has tokens 2 to 5 of each, in its own order.
TEST_P(RowTokensTest, FollowsContextAndTensorRanks) {
  Array draw({2}, DType::i64);
  draw.tensor().ptr<int64_t>()[1] = 100;
  const auto index = [&](const TokenOfRow& token, int64_t n) {
    Array to({n}, DType::i32);
    row_tokens(s_, {.index_T = to.tensor(), .draw_2 = draw.tensor(), .token = token});
    synchronize(s_);
    return to.values();
  };
  EXPECT_EQ(index({.first = 3, .seq = 8}, 2), (Values{103, 104}));
  EXPECT_EQ(index({.seq = 4, .cp = 2, .context = 0}, 8), (Values{100, 101, 106, 107, 108, 109, 114, 115}));
  EXPECT_EQ(index({.first = 4, .seq = 4, .cp = 2, .context = 1}, 4), (Values{110, 111, 112, 113}));
}

}  // namespace
}  // namespace moebius
