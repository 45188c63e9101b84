#include "ops/optimizer/optimizer.h"

#include "ops/cpu/testing.h"
#include "ops/optimizer/optimizer_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

struct Case {};
class OptimizerTest : public testing::DeviceTest<Case> {};
INSTANTIATE_TEST_SUITE_P(Devices, OptimizerTest, ::testing::ValuesIn(testing::on_each_device<Case>({Case{}})));

TEST_P(OptimizerTest, SumSquaresAddsInDouble) {
  for (const int64_t n : {0, 1, 7, 65536, 100000, 200003}) {
    Array x = Array::normal({n}, DType::f32, 1), sum = Array::of({1}, DType::f64, {3}),
          partial = Array::poisoned({SumSquares::num_partials(n)}, DType::f64);
    const Values v = x.values();
    sum_squares(s_, {.sum_1 = sum.tensor(), .partial_P = partial.tensor(), .x_n = x.tensor()});
    // n additions in double to a sum that grows to n, on either side.
    EXPECT_NEAR(sum.values()[0], 3 + testing::dot(v, v), 0x1p-52 * (n + 3) * std::sqrt(n));
  }
}

TEST_P(OptimizerTest, ClipScale) {
  const auto clipped = [&](double sum, float clip) {
    Array norm = Array::poisoned({1}, DType::f32), scale = norm, squares = Array::of({1}, DType::f64, {sum});
    clip_scale(s_,
               {.norm_1 = norm.tensor(), .scale_1 = scale.tensor(), .sum_squares_1 = squares.tensor(), .clip = clip});
    return std::pair(norm.values()[0], scale.values()[0]);
  };
  EXPECT_EQ(clipped(16, 0), std::pair(4.0, 1.0));
  EXPECT_EQ(clipped(16, 5), std::pair(4.0, 1.0));
  EXPECT_NEAR(clipped(16, 1).second, 1 / 4.000001, 1e-7);
  EXPECT_EQ(clipped(0, 1), std::pair(0.0, 1.0));
  EXPECT_TRUE(std::isnan(clipped(kInf, 1).second));
  EXPECT_TRUE(std::isnan(clipped(kInf, 0).second));
  EXPECT_TRUE(std::isnan(clipped(kNaN, 1).second));
  // A norm of 1e40: finite in double, infinite in the f32 that the caller sees.
  EXPECT_TRUE(std::isnan(clipped(1e80, 1).second));
  EXPECT_EQ(clipped(1e80, 1).first, kInf);
}

// Three steps; the parameter in bf16, in f32, and being the master.
TEST_P(OptimizerTest, AdamWEqualsTheReference) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int64_t n : {0, 1, 33, 20001, 20016}) {
      Array master = Array::normal({n}, DType::f32, 1), m({n}, DType::f32), v({n}, DType::f32),
            param = Array::poisoned({n}, dtype);
      Array scale = Array::of({1}, DType::f32, {0.5}), alone = master, alone_m = m, alone_v = v;
      Values want = master.values(), want_m(n), want_v(n);
      for (int64_t step = 1; step <= 3; ++step) {
        Array grad = Array::normal({n}, DType::f32, 10 + step);
        ref::adamw({.master = want,
                    .m = want_m,
                    .v = want_v,
                    .grad = grad.values(),
                    .scale = 0.5,
                    .lr = 0.125,
                    .beta1 = 0.875,
                    .beta2 = 0.96875,
                    .eps = 0x1p-10,
                    .weight_decay = 0.25,
                    .step = step});
        AdamW a{.param_n = param.tensor(),
                .master_n = master.tensor(),
                .m_n = m.tensor(),
                .v_n = v.tensor(),
                .grad_n = grad.tensor(),
                .scale_1 = scale.tensor(),
                .lr = 0.125f,
                .beta1 = 0.875f,
                .beta2 = 0.96875f,
                .eps = 0x1p-10f,
                .weight_decay = 0.25f,
                .step = step};
        adamw(s_, a);
        a.param_n = a.master_n = alone.tensor();
        a.m_n = alone_m.tensor();
        a.v_n = alone_v.tensor();
        adamw(s_, a);
      }
      // About ten operations in f32 a step.
      const double error = 3 * 10 * testing::epsilon(DType::f32);
      testing::expect_close("master", master.values(), want, error, 0);
      testing::expect_close("m", m.values(), want_m, error, 0);
      testing::expect_close("v", v.values(), want_v, error, 0);
      testing::expect_close("param", param.values(), master.values(), testing::epsilon(dtype), 0);
      EXPECT_EQ(alone.bytes(), master.bytes());
    }
  }
}

// In memory, where a recorded step reads them, lr and step give the same bits.
TEST_P(OptimizerTest, AScheduleInMemoryStandsForLrAndStep) {
  Array master = Array::normal({1000}, DType::f32, 1), grad = Array::normal({1000}, DType::f32, 2),
        m = Array::normal({1000}, DType::f32, 3, 0.1), v({1000}, DType::f32), scale = Array::of({1}, DType::f32, {1});
  Array schedule = Array::of({2}, DType::f64, {0.3, 7});
  const auto updated = [&](bool in_memory) {
    Array p = Array::poisoned({1000}, DType::bf16), w = master, new_m = m, new_v = v;
    AdamW a{.param_n = p.tensor(),
            .master_n = w.tensor(),
            .m_n = new_m.tensor(),
            .v_n = new_v.tensor(),
            .grad_n = grad.tensor(),
            .scale_1 = scale.tensor(),
            .lr = in_memory ? 99.0f : 0.3f,
            .weight_decay = 0.1f,
            .step = in_memory ? 1 : 7};
    if (in_memory) a.schedule_2 = schedule.tensor();
    adamw(s_, a);
    return std::vector{p.bytes(), w.bytes(), new_m.bytes(), new_v.bytes()};
  };
  EXPECT_EQ(updated(true), updated(false));
}

TEST_P(OptimizerTest, AScaleThatIsNaNLeavesAllAsItWas) {
  Array param = Array::normal({5}, DType::bf16, 1), master = Array::normal({5}, DType::f32, 2), m = master, v = master,
        grad = Array::of({5}, DType::f32, Values(5, kNaN));
  Array scale = Array::of({1}, DType::f32, {kNaN});
  const Array old_param = param, old = master;
  adamw(s_, {.param_n = param.tensor(),
             .master_n = master.tensor(),
             .m_n = m.tensor(),
             .v_n = v.tensor(),
             .grad_n = grad.tensor(),
             .scale_1 = scale.tensor(),
             .lr = 1});
  EXPECT_EQ(param.bytes(), old_param.bytes());
  for (const Array* a : {&master, &m, &v}) EXPECT_EQ(a->bytes(), old.bytes());
}

TEST(Optimizer, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    const int64_t n = 200003;
    Array master = Array::normal({n}, DType::f32, 1), m({n}, DType::f32), v({n}, DType::f32), param({n}, DType::bf16),
          grad = Array::normal({n}, DType::f32, 2);
    Array sum({1}, DType::f64), partial({SumSquares::num_partials(n)}, DType::f64), norm({1}, DType::f32),
        scale({1}, DType::f32);
    sum_squares(s, {.sum_1 = sum.tensor(), .partial_P = partial.tensor(), .x_n = grad.tensor()});
    clip_scale(s, {.norm_1 = norm.tensor(), .scale_1 = scale.tensor(), .sum_squares_1 = sum.tensor(), .clip = 1});
    adamw(s, {.param_n = param.tensor(),
              .master_n = master.tensor(),
              .m_n = m.tensor(),
              .v_n = v.tensor(),
              .grad_n = grad.tensor(),
              .scale_1 = scale.tensor(),
              .lr = 0.1f});
    return std::vector<Array>{sum, param, master, m, v};
  });
}

TEST_P(OptimizerTest, BadArgumentsAreNamed) {
  Array x({4}, DType::f32), y({5}, DType::f32), one({1}, DType::f32), sum({1}, DType::f64);
  EXPECT_EQ(testing::error_of(
                [&] { sum_squares(s_, {.sum_1 = sum.tensor(), .partial_P = sum.tensor(), .x_n = sum.tensor()}); }),
            "sum_squares: x must be f32[1]; got f64[1]");
  EXPECT_EQ(testing::error_of([&] {
              clip_scale(s_,
                         {.norm_1 = one.tensor(), .scale_1 = one.tensor(), .sum_squares_1 = sum.tensor(), .clip = -1});
            }),
            "clip_scale: clip must not be negative; got -1; 0 turns clipping off");
  AdamW a{.param_n = x.tensor(),
          .master_n = x.tensor(),
          .m_n = x.tensor(),
          .v_n = x.tensor(),
          .grad_n = y.tensor(),
          .scale_1 = one.tensor()};
  EXPECT_EQ(testing::error_of([&] { adamw(s_, a); }), "adamw: grad must be f32[4]; got f32[5]");
  a.grad_n = x.tensor();
  a.schedule_2 = y.tensor();
  EXPECT_EQ(testing::error_of([&] { adamw(s_, a); }), "adamw: schedule must be f64[2]; got f32[5]");
  a.schedule_2 = {};
  a.step = 0;
  EXPECT_EQ(testing::error_of([&] { adamw(s_, a); }), "adamw: step counts from 1; got 0");
}

TEST(Optimizer, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({4}), one = testing::null_tensor({1}),
                 sum = testing::null_tensor({1}, DType::f64);
    sum_squares(s, {.sum_1 = sum, .partial_P = sum, .x_n = x});
    clip_scale(s, {.norm_1 = one, .scale_1 = one, .sum_squares_1 = sum});
    adamw(s, {.param_n = testing::null_tensor({4}, DType::bf16),
              .master_n = x,
              .m_n = x,
              .v_n = x,
              .grad_n = x,
              .scale_1 = one});
  });
  EXPECT_EQ(cost.bytes, 16 + 16 + 4 * 30);
}

}  // namespace
}  // namespace moebius
