// Masters and moments in other formats than f32 (ops/optimizer/rounding.h).
#include <array>
#include <cmath>

#include "ops/cpu/testing.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/optimizer_ref.h"
#include "ops/optimizer/rounding.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// Every exponent and sign, with mantissas around the border between two bf16, and drawn ones.
std::vector<float> many_floats() {
  std::vector<float> all;
  for (uint32_t high = 0; high < 0x10000u; ++high)
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      all.push_back(std::bit_cast<float>(high << 16 | low));
  const Rng rng(3, RngSite::bench);
  for (uint64_t i = 0; i < 100000; ++i) all.push_back(std::bit_cast<float>(rng.bits(i)[0]));
  return all;
}

TEST(Rounding, AWeightAndItsRemainderAreTheMaster) {
  int64_t ties = 0;
  for (const float master : many_floats()) {
    const auto [weight, remainder] = split(master);
    const float back = joined(weight, remainder);
    if (std::isnan(master)) {
      EXPECT_TRUE(std::isnan(back) && std::isnan(to_f32(weight)));
      continue;
    }
    ASSERT_EQ(bits_of(back), bits_of(master));
    // The weight differs from the nearest, ties to even, at ties alone; and there it is as near.
    const bool tie = (bits_of(master) & 0xffffu) == 0x8000u;
    ties += tie;
    if (!tie) {
      ASSERT_EQ(weight.bits, to_bf16(master).bits) << bits_of(master);
    } else {
      ASSERT_EQ(weight.bits, static_cast<uint16_t>((bits_of(master) >> 16) + 1)) << bits_of(master);
    }
  }
  EXPECT_GT(ties, 60000);
}

// In double: x becomes the neighbour away from 0 where the draw is among the last of 2^16 that its
// distance from the other is a share of.
uint16_t stochastic_ref(float x, uint32_t draw) {
  const uint16_t low = static_cast<uint16_t>(bits_of(x) >> 16);
  if (!std::isfinite(x)) return low;
  const auto value = [](uint32_t code) {
    return std::abs(std::ldexp(double(0x80u + (code & 0x7fu)), int(code >> 7 & 0xffu)));
  };
  if ((low & 0x7f80u) == 0) return static_cast<uint16_t>((bits_of(x) + draw) >> 16);  // subnormal: one step is 2^-133
  const double below = value(low & 0x7fffu), step = std::ldexp(1.0, int(low >> 7 & 0xffu));
  const double exact = below + step * ((bits_of(x) & 0xffffu) / 65536.0);
  const bool up = draw / 65536.0 >= 1 - (exact - below) / step;
  return static_cast<uint16_t>(low + (up ? 1 : 0));
}

TEST(Rounding, StochasticTakesOneOfTheNeighbours) {
  const Rng rng(5, RngSite::bench);
  uint64_t i = 0;
  for (const float x : many_floats()) {
    const uint32_t draw = rng.bits(i++)[0] & 0xffffu;
    const uint16_t got = to_bf16_stochastic(x, draw).bits;
    if (std::isnan(x))
      ASSERT_TRUE(std::isnan(to_f32(bf16{got})));
    else
      ASSERT_EQ(got, stochastic_ref(x, draw)) << bits_of(x) << " " << draw;
  }
}

// The mean of n draws has a deviation of at most half a step / sqrt(n); five of them are allowed.
TEST(Rounding, StochasticKeepsTheMean) {
  const Rng rng(7, RngSite::bench);
  for (const float x : {1.001f, -3.0421f, 1e-3f, 255.9f}) {
    constexpr int kNum = 40000;
    double sum = 0;
    for (uint64_t i = 0; i < kNum; ++i) sum += to_f32(to_bf16_stochastic(x, rng.bits(i)[1] & 0xffffu));
    const double step = std::ldexp(1.0, std::ilogb(x) - 7);
    EXPECT_NEAR(sum / kNum, x, 5 * 0.5 * step / std::sqrt(kNum));
    EXPECT_GT(std::abs(to_f32(to_bf16(x)) - x), 5 * 0.5 * step / std::sqrt(kNum)) << "nearest has this bias";
  }
}

enum class Master { f32, remainder, param };
struct Case {
  DType moments = DType::f32;
  Master master = Master::f32;
  bool adamw = true;
};
const std::vector<Case> kCases = {{DType::f32, Master::remainder},     {DType::f32, Master::param},
                                  {DType::bf16, Master::f32},          {DType::bf16, Master::remainder},
                                  {DType::bf16, Master::param},        {DType::f32, Master::remainder, false},
                                  {DType::bf16, Master::param, false}, {DType::bf16, Master::f32, false}};

class OptimizerFormats : public testing::DeviceTest<Case> {
 protected:
  // The arrays of a tensor, from f32 masters.
  struct Arrays {
    Array param, master, remainder, m, v, grad;
  };
  Arrays arrays(int64_t n, const Case& form, uint64_t key) {
    Arrays a{.param = Array({n}, DType::bf16),
             .master = Array::normal({n}, DType::f32, key),
             .remainder = Array({n}, DType::u16),
             .m = Array::normal({n}, form.moments, key + 1, 0.1),
             .v = Array({n}, form.moments),
             .grad = Array::normal({n}, DType::f32, key + 2)};
    if (form.master == Master::remainder)
      split_master(s_,
                   {.weight_n = a.param.tensor(), .remainder_n = a.remainder.tensor(), .master_n = a.master.tensor()});
    else
      for (int64_t i = 0; i < n; ++i) a.param.tensor().ptr<bf16>()[i] = to_bf16(a.master.tensor().ptr<float>()[i]);
    if (form.master == Master::param)
      for (int64_t i = 0; i < n; ++i) a.master.tensor().ptr<float>()[i] = to_f32(a.param.tensor().ptr<bf16>()[i]);
    return a;
  }
  UpdatedTensor tensor(Arrays& a, const Case& form, const RoundingDraws& draws = {}) {
    UpdatedTensor t{.param_n = a.param.tensor(),
                    .m_n = a.m.tensor(),
                    .grad_n = a.grad.tensor(),
                    .weight_decay = 0.25f,
                    .draws = draws};
    if (form.adamw) t.v_n = a.v.tensor();
    if (form.master == Master::f32) t.master_n = a.master.tensor();
    if (form.master == Master::remainder) t.remainder_n = a.remainder.tensor();
    return t;
  }
  void update(std::span<const UpdatedTensor> tensors, const Case& form, int64_t step) {
    Array scale = Array::of({1}, DType::f32, {0.5});
    if (form.adamw)
      adamw(s_, {.tensors = tensors, .scale_1 = scale.tensor(), .lr = 0.125f, .beta1 = 0.875f, .step = step});
    else
      sgd(s_, {.tensors = tensors, .scale_1 = scale.tensor(), .lr = 0.125f, .momentum = 0.5f, .step = step});
    scale.values();  // waits
  }
  static std::vector<std::vector<unsigned char>> bytes(const Arrays& a) {
    return {a.param.bytes(), a.master.bytes(), a.remainder.bytes(), a.m.bytes(), a.v.bytes()};
  }
};
INSTANTIATE_TEST_SUITE_P(Forms, OptimizerFormats, ::testing::ValuesIn(testing::on_each_device(kCases)));

Array f32_of(const Array& x) { return Array::of({static_cast<int64_t>(x.values().size())}, DType::f32, x.values()); }

// Each step begins with f32 tensors of the same values. The stored numbers are what those tensors
// become, rounded with the draw of the element, seed and step.
TEST_P(OptimizerFormats, UpdateAsF32DoesAndThenRound) {
  const int64_t n = 5003;
  Arrays got = arrays(n, c(), 1);
  const RoundingDraws draws{.seed = 9, .key = 77, .begin = 3, .run = 10, .stride = 40, .first = 20};
  for (int64_t step = 1; step <= 50; ++step) {
    got.grad = Array::normal({n}, DType::f32, 1000 + static_cast<uint64_t>(step));
    Arrays f32 = arrays(n, {.adamw = c().adamw}, 1);
    f32.m = f32_of(got.m);
    f32.v = f32_of(got.v);
    f32.grad = got.grad;
    if (c().master == Master::remainder)
      join_master(
          s_, {.master_n = f32.master.tensor(), .weight_n = got.param.tensor(), .remainder_n = got.remainder.tensor()});
    else
      f32.master = c().master == Master::f32 ? got.master : f32_of(got.param);
    const UpdatedTensor t = tensor(got, c(), draws), expected = tensor(f32, {.adamw = c().adamw});
    update({&t, 1}, c(), step);
    update({&expected, 1}, c(), step);
    const Rng rng(9, RngSite::rounding, static_cast<uint64_t>(step), 77);
    for (int64_t i = 0; i < n; ++i) {
      const auto bits = rng.bits(static_cast<uint64_t>(20 + (3 + i) / 10 * 40 + (3 + i) % 10));
      const auto at = [&](Array& a) { return a.tensor().ptr<float>()[i]; };
      const auto stored = [&](Array& a, float x, uint32_t draw) {
        if (a.tensor().dtype == DType::f32) return bits_of(at(a)) == bits_of(x);
        return a.tensor().ptr<bf16>()[i].bits == stochastic_ref(x, draw & 0xffffu);
      };
      ASSERT_TRUE(stored(got.m, at(f32.m), bits[0])) << step << " " << i;
      if (c().adamw) {
        ASSERT_TRUE(stored(got.v, at(f32.v), bits[0] >> 16)) << step << " " << i;
      }
      const float master = at(f32.master);
      const bf16 weight = got.param.tensor().ptr<bf16>()[i];
      switch (c().master) {
        case Master::f32:
          ASSERT_EQ(bits_of(at(got.master)), bits_of(master));
          ASSERT_EQ(weight.bits, to_bf16(master).bits);
          break;
        case Master::remainder:
          ASSERT_EQ(bits_of(joined(weight, got.remainder.tensor().ptr<uint16_t>()[i])), bits_of(master));
          ASSERT_EQ(weight.bits, split(master).weight.bits);
          break;
        case Master::param:
          ASSERT_EQ(weight.bits, stochastic_ref(master, bits[1] & 0xffffu));
      }
    }
  }
}

// f32 masters over 50 steps, and the same with remainders: the same bits, moments too.
TEST_P(OptimizerFormats, RemaindersAreF32Masters) {
  if (c().master != Master::remainder || c().moments != DType::f32) GTEST_SKIP() << "of remainders beside f32 moments";
  const int64_t n = 20001;
  const Case exact{.adamw = c().adamw};
  Arrays got = arrays(n, c(), 1), f32 = arrays(n, exact, 1);
  for (int64_t step = 1; step <= 50; ++step) {
    got.grad = f32.grad = Array::normal({n}, DType::f32, 1000 + static_cast<uint64_t>(step));
    const UpdatedTensor t = tensor(got, c()), u = tensor(f32, exact);
    update({&t, 1}, c(), step);
    update({&u, 1}, c(), step);
  }
  join_master(s_,
              {.master_n = got.master.tensor(), .weight_n = got.param.tensor(), .remainder_n = got.remainder.tensor()});
  EXPECT_EQ(got.master.bytes(), f32.master.bytes());
  EXPECT_EQ(got.m.bytes(), f32.m.bytes());
  EXPECT_EQ(got.v.bytes(), f32.v.bytes());
}

// A matrix of 30 rows of 40 as a whole, in ranges, and in shards of its columns.
TEST_P(OptimizerFormats, ShardsHaveTheBitsOfTheWhole) {
  const int64_t rows = 30, columns = 40, n = rows * columns;
  Arrays whole = arrays(n, c(), 1), ranges = whole, shards = whole;
  const RoundingDraws draws{.seed = 1, .key = 2, .run = n, .stride = n};
  const UpdatedTensor all = tensor(whole, c(), draws);
  update({&all, 1}, c(), 3);
  const auto part = [](UpdatedTensor t, int64_t begin, int64_t end) {
    for (Tensor* x : {&t.param_n, &t.master_n, &t.remainder_n, &t.m_n, &t.v_n, &t.grad_n})
      if (!x->empty()) *x = x->rows(begin, end);
    return t;
  };
  std::vector<UpdatedTensor> cut;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 517}, {517, n}}) {
    cut.push_back(part(tensor(ranges, c(), draws), begin, end));
    cut.back().draws.begin = begin;
  }
  update(cut, c(), 3);
  EXPECT_EQ(bytes(ranges), bytes(whole));
  // Columns [16, 40) and [0, 16), as ranks of tp hold them: each row of a shard by itself is where it is in the whole.
  std::vector<UpdatedTensor> by_rows;
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{16, 24}, {0, 16}}) {
    for (int64_t r = 0; r < rows; ++r) {
      by_rows.push_back(part(tensor(shards, c(), draws), r * columns + first, r * columns + first + count));
      by_rows.back().draws = {.seed = 1, .key = 2, .begin = r * count, .run = count, .stride = columns, .first = first};
    }
  }
  update(by_rows, c(), 3);
  EXPECT_EQ(bytes(shards), bytes(whole));
}

// A CUDA graph reads the step from memory, and draws with it.
TEST_P(OptimizerFormats, AStepInDeviceMemoryGivesTheSameRandomBits) {
  Arrays by_argument = arrays(1000, c(), 1), in_memory = by_argument, other_step = by_argument;
  Array scale = Array::of({1}, DType::f32, {0.5}), lr_and_step = Array::of({2}, DType::f64, {0.125, 7});
  const UpdatedTensor a = tensor(by_argument, c()), b = tensor(in_memory, c()), d = tensor(other_step, c());
  update({&a, 1}, c(), 7);
  update({&d, 1}, c(), 8);
  if (c().adamw)
    adamw(s_, {.tensors = {&b, 1}, .scale_1 = scale.tensor(), .lr_and_step_2 = lr_and_step.tensor(), .beta1 = 0.875f});
  else
    sgd(s_, {.tensors = {&b, 1}, .scale_1 = scale.tensor(), .lr_and_step_2 = lr_and_step.tensor(), .momentum = 0.5f});
  EXPECT_EQ(bytes(in_memory), bytes(by_argument));
  if (a.draws_bits()) {
    EXPECT_NE(bytes(other_step), bytes(by_argument));
  }
}

TEST_P(OptimizerFormats, AScaleThatIsNaNLeavesAllAsItWas) {
  Arrays got = arrays(1000, c(), 1);
  const Arrays before = got;
  Array scale = Array::of({1}, DType::f32, {std::numeric_limits<double>::quiet_NaN()});
  const UpdatedTensor t = tensor(got, c());
  if (c().adamw)
    adamw(s_, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 1});
  else
    sgd(s_, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 1, .momentum = 0.5f});
  EXPECT_EQ(bytes(got), bytes(before));
}

// Tensors of all forms in one call, more than a kernel processes at once.
TEST_P(OptimizerFormats, ManyTensorsAreUpdatedAsEachByItself) {
  std::vector<Arrays> together, alone;
  std::vector<Case> forms;
  for (uint64_t i = 0; i < 90; ++i) {
    forms.push_back(kCases[i % 5]);
    together.push_back(arrays(1 + static_cast<int64_t>(i) * 131 % 1500, forms.back(), 10 * i));
  }
  alone = together;
  std::vector<UpdatedTensor> all;
  for (size_t i = 0; i < forms.size(); ++i)
    all.push_back(tensor(together[i], forms[i], {.key = static_cast<uint32_t>(i)}));
  update(all, {}, 2);
  for (size_t i = 0; i < forms.size(); ++i) {
    const UpdatedTensor t = tensor(alone[i], forms[i], {.key = static_cast<uint32_t>(i)});
    update({&t, 1}, forms[i], 2);
    ASSERT_EQ(bytes(together[i]), bytes(alone[i])) << i;
  }
}

TEST(OptimizerFormatErrors, AreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array f32({4}, DType::f32), half({4}, DType::bf16), bits({4}, DType::u16), one({1}, DType::f32);
  const auto error = [&](const UpdatedTensor& t) {
    return testing::error_of([&] { adamw(s, {.tensors = {&t, 1}, .scale_1 = one.tensor()}); });
  };
  UpdatedTensor t{.param_n = f32.tensor(), .m_n = half.tensor(), .v_n = half.tensor(), .grad_n = f32.tensor()};
  EXPECT_EQ(error(t), "adamw: param must be bf16[4]; got f32[4]");
  t.param_n = half.tensor();
  t.v_n = f32.tensor();
  EXPECT_EQ(error(t), "adamw: v must be bf16[4]; got f32[4]");
  t.v_n = half.tensor();
  t.remainder_n = half.tensor();
  EXPECT_EQ(error(t), "adamw: remainder must be u16[4]; got bf16[4]");
  t.remainder_n = bits.tensor();
  t.master_n = f32.tensor();
  EXPECT_EQ(error(t), "adamw: expected a master or a remainder of each tensor; got both");
  t.master_n = {};
  t.draws.run = 0;
  EXPECT_EQ(error(t), "adamw: expected runs of at least one element; got 0");
  EXPECT_EQ(testing::error_of([&] {
              join_master(s, {.master_n = f32.tensor(), .weight_n = f32.tensor(), .remainder_n = bits.tensor()});
            }),
            "join_master: weight must be bf16[4]; got f32[4]");
  EXPECT_EQ(testing::error_of([&] {
              split_master(s, {.weight_n = half.tensor(), .remainder_n = f32.tensor(), .master_n = f32.tensor()});
            }),
            "split_master: remainder must be u16[4]; got f32[4]");
}

}  // namespace
}  // namespace moebius
