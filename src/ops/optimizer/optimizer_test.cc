#include "ops/optimizer/optimizer.h"

#include "device/block_limit.h"
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
          partial = Array::poisoned({SumSquares::num_partials(x.tensor())}, DType::f64);
    const Values v = x.values();
    const Tensor tensor = x.tensor();
    sum_squares(s_, {.sum_1 = sum.tensor(), .partial_P = partial.tensor(), .x = {&tensor, 1}});
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
  // A norm of 1e40: finite in double, infinite in the f32 that the caller gets.
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
        UpdatedTensor t{.param_n = param.tensor(),
                        .master_n = master.tensor(),
                        .m_n = m.tensor(),
                        .v_n = v.tensor(),
                        .grad_n = grad.tensor(),
                        .weight_decay = 0.25f};
        const AdamW a{.tensors = {&t, 1},
                      .scale_1 = scale.tensor(),
                      .lr = 0.125f,
                      .beta1 = 0.875f,
                      .beta2 = 0.96875f,
                      .eps = 0x1p-10f,
                      .step = step};
        adamw(s_, a);
        t.param_n = t.master_n = alone.tensor();
        t.m_n = alone_m.tensor();
        t.v_n = alone_v.tensor();
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

// Each step's error in f32 is a few roundings of values of the size of the master and of m.
TEST_P(OptimizerTest, SgdEqualsItsReference) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double momentum : {0.0, 0.875}) {
      for (const int64_t n : {0, 1, 7, 1000, 70001}) {
        Array master = Array::normal({n}, DType::f32, 1), grad = Array::normal({n}, DType::f32, 2), m({n}, DType::f32),
              param = Array::poisoned({n}, dtype), scale = Array::of({1}, DType::f32, {0.5}),
              lr_and_step = Array::of({2}, DType::f64, {0.125, 7}),
              other_lr_and_step = Array::of({2}, DType::f64, {99, 7});
        Array alone = master, alone_m = m;
        Values want = master.values(), want_m = m.values();
        for (int step = 0; step < 3; ++step) {
          ref::sgd({.master = want,
                    .m = want_m,
                    .grad = grad.values(),
                    .scale = 0.5,
                    .lr = 0.125,
                    .momentum = momentum,
                    .weight_decay = 0.25});
          UpdatedTensor t{.param_n = param.tensor(),
                          .master_n = master.tensor(),
                          .m_n = momentum == 0 ? Tensor{} : m.tensor(),
                          .grad_n = grad.tensor(),
                          .weight_decay = 0.25f};
          Sgd a{.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 0.125f, .momentum = static_cast<float>(momentum)};
          sgd(s_, a);
          t.param_n = t.master_n = alone.tensor();
          if (momentum != 0) t.m_n = alone_m.tensor();
          a.lr = 99;  // lr in memory replaces it
          a.lr_and_step_2 = lr_and_step.tensor();
          if (step == 1) {  // unless it is not read
            a.lr = 0.125f;
            a.lr_and_step_2 = other_lr_and_step.tensor();
            a.reads_lr = false;
          }
          sgd(s_, a);
        }
        const double error = 3 * 4 * testing::epsilon(DType::f32);
        testing::expect_close("master", master.values(), want, error, 1e-12);
        if (momentum != 0) testing::expect_close("m", m.values(), want_m, error, 1e-12);
        testing::expect_close("param", param.values(), master.values(), testing::epsilon(dtype), 0);
        EXPECT_EQ(alone.bytes(), master.bytes());
      }
    }
  }
}

TEST_P(OptimizerTest, SgdChangesNothingWhenTheScaleIsNaN) {
  Array master = Array::normal({100}, DType::f32, 1), grad = Array::normal({100}, DType::f32, 2), m({100}, DType::f32),
        scale = Array::of({1}, DType::f32, {kNaN});
  const auto before = master.bytes();
  const UpdatedTensor t{
      .param_n = master.tensor(), .master_n = master.tensor(), .m_n = m.tensor(), .grad_n = grad.tensor()};
  sgd(s_, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 1, .momentum = 0.5f});
  EXPECT_EQ(master.bytes(), before);
  EXPECT_EQ(m.values(), Values(100, 0.0));
}

// In memory, where a CUDA graph reads them, lr and step give the same bits.
TEST_P(OptimizerTest, LrAndStepMayBeInDeviceMemory) {
  Array master = Array::normal({1000}, DType::f32, 1), grad = Array::normal({1000}, DType::f32, 2),
        m = Array::normal({1000}, DType::f32, 3, 0.1), v({1000}, DType::f32), scale = Array::of({1}, DType::f32, {1});
  Array lr_and_step = Array::of({2}, DType::f64, {0.3, 7});
  const auto updated = [&](bool in_memory) {
    Array p = Array::poisoned({1000}, DType::bf16), w = master, new_m = m, new_v = v;
    const UpdatedTensor t{.param_n = p.tensor(),
                          .master_n = w.tensor(),
                          .m_n = new_m.tensor(),
                          .v_n = new_v.tensor(),
                          .grad_n = grad.tensor(),
                          .weight_decay = 0.1f};
    AdamW a{.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = in_memory ? 99.0f : 0.3f, .step = in_memory ? 1 : 7};
    if (in_memory) a.lr_and_step_2 = lr_and_step.tensor();
    adamw(s_, a);
    return std::vector{p.bytes(), w.bytes(), new_m.bytes(), new_v.bytes()};
  };
  EXPECT_EQ(updated(true), updated(false));
}

// Many tensors in one call, more than a kernel processes at once: odd sizes and addresses,
// none, both dtypes.
struct Model {
  Model(int64_t num, DType other) {
    for (int64_t i = 0; i < num; ++i) {
      const int64_t n = i % 7 == 3 ? 0 : 1 + (i * 7919) % 70001;
      const DType dtype = i % 3 == 1 ? other : DType::f32;
      master.push_back(Array::normal({n}, DType::f32, 100 + i));
      grad.push_back(Array::normal({n}, DType::f32, 900 + i));
      m.emplace_back(Shape{n}, DType::f32);
      v.emplace_back(Shape{n}, DType::f32);
      param.push_back(Array::poisoned({n}, dtype));
    }
  }
  std::vector<UpdatedTensor> tensors() {
    std::vector<UpdatedTensor> all;
    for (size_t i = 0; i < master.size(); ++i) {
      // Every fifth from its second element on, where no vector begins.
      const int64_t n = master[i].tensor().numel(), first = i % 5 == 4 && n > 1 ? 1 : 0;
      const auto part = [&](Array& x) { return x.tensor().rows(first, n); };
      all.push_back({.param_n = part(param[i]),
                     .master_n = part(master[i]),
                     .m_n = part(m[i]),
                     .v_n = part(v[i]),
                     .grad_n = part(grad[i]),
                     .weight_decay = i % 2 == 0 ? 0.25f : 0.0f});
    }
    return all;
  }
  std::vector<std::vector<unsigned char>> bytes() {
    std::vector<std::vector<unsigned char>> all;
    for (auto* arrays : {&master, &m, &v, &param})
      for (const Array& x : *arrays) all.push_back(x.bytes());
    return all;
  }
  std::vector<Array> master, grad, m, v, param;
};

TEST_P(OptimizerTest, ManyTensorsAreUpdatedAsEachByItself) {
  Model together(150, DType::bf16), alone(150, DType::bf16);
  Array scale = Array::of({1}, DType::f32, {0.5});
  AdamW a{.scale_1 = scale.tensor(), .lr = 0.125f, .step = 3};
  const std::vector<UpdatedTensor> all = together.tensors(), each = alone.tensors();
  a.tensors = all;
  adamw(s_, a);
  for (const UpdatedTensor& t : each) {
    a.tensors = {&t, 1};
    adamw(s_, a);
  }
  EXPECT_EQ(together.bytes(), alone.bytes());
}

TEST_P(OptimizerTest, FewBlocksUpdateAsAllDo) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "of a GPU";
  Model all(20, DType::bf16), few(20, DType::bf16);
  Array scale = Array::of({1}, DType::f32, {0.5});
  const std::vector<UpdatedTensor> by_all = all.tensors(), by_few = few.tensors();
  adamw(s_, {.tensors = by_all, .scale_1 = scale.tensor(), .lr = 0.125f, .step = 3});
  const BlockLimitScope limit(s_, 3);  // each is divided into many pieces
  adamw(s_, {.tensors = by_few, .scale_1 = scale.tensor(), .lr = 0.125f, .step = 3});
  EXPECT_EQ(all.bytes(), few.bytes());
}

TEST_P(OptimizerTest, ManyTensorsHaveTheSumOfSquaresOfEachInTurn) {
  Model model(150, DType::f32);
  std::vector<Tensor> x;
  for (const UpdatedTensor& t : model.tensors()) x.push_back(t.grad_n);
  const auto sum_of = [&](Array& sum, std::span<const Tensor> some) {
    Array partial = Array::poisoned({SumSquares::num_partials(some)}, DType::f64);
    sum_squares(s_, {.sum_1 = sum.tensor(), .partial_P = partial.tensor(), .x = some});
    return sum.bytes();
  };
  Array together = Array::of({1}, DType::f64, {3}), one_by_one = together;
  sum_of(together, x);
  for (const Tensor& each : x) sum_of(one_by_one, {&each, 1});
  EXPECT_EQ(together.bytes(), one_by_one.bytes());
  EXPECT_GT(together.values()[0], 1e6);
}

TEST_P(OptimizerTest, AScaleThatIsNaNLeavesAllAsItWas) {
  Array param = Array::normal({5}, DType::bf16, 1), master = Array::normal({5}, DType::f32, 2), m = master, v = master,
        grad = Array::of({5}, DType::f32, Values(5, kNaN));
  Array scale = Array::of({1}, DType::f32, {kNaN});
  const Array old_param = param, old = master;
  const UpdatedTensor t{.param_n = param.tensor(),
                        .master_n = master.tensor(),
                        .m_n = m.tensor(),
                        .v_n = v.tensor(),
                        .grad_n = grad.tensor()};
  adamw(s_, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 1});
  EXPECT_EQ(param.bytes(), old_param.bytes());
  for (const Array* a : {&master, &m, &v}) EXPECT_EQ(a->bytes(), old.bytes());
}

TEST(Optimizer, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    const int64_t n = 200003;
    Array master = Array::normal({n}, DType::f32, 1), m({n}, DType::f32), v({n}, DType::f32), param({n}, DType::bf16),
          grad = Array::normal({n}, DType::f32, 2);
    const Tensor x = grad.tensor();
    Array sum({1}, DType::f64), partial({SumSquares::num_partials(x)}, DType::f64), norm({1}, DType::f32),
        scale({1}, DType::f32);
    sum_squares(s, {.sum_1 = sum.tensor(), .partial_P = partial.tensor(), .x = {&x, 1}});
    clip_scale(s, {.norm_1 = norm.tensor(), .scale_1 = scale.tensor(), .sum_squares_1 = sum.tensor(), .clip = 1});
    const UpdatedTensor t{
        .param_n = param.tensor(), .master_n = master.tensor(), .m_n = m.tensor(), .v_n = v.tensor(), .grad_n = x};
    adamw(s, {.tensors = {&t, 1}, .scale_1 = scale.tensor(), .lr = 0.1f});
    return std::vector<Array>{sum, param, master, m, v};
  });
}

TEST_P(OptimizerTest, BadArgumentsAreNamed) {
  Array x({4}, DType::f32), y({5}, DType::f32), one({1}, DType::f32), sum({1}, DType::f64);
  const Tensor wrong = sum.tensor();
  EXPECT_EQ(testing::error_of([&] {
              sum_squares(s_, {.sum_1 = sum.tensor(), .partial_P = sum.tensor(), .x = {&wrong, 1}});
            }),
            "sum_squares: x must be f32[1]; got f64[1]");
  EXPECT_EQ(testing::error_of([&] {
              clip_scale(s_,
                         {.norm_1 = one.tensor(), .scale_1 = one.tensor(), .sum_squares_1 = sum.tensor(), .clip = -1});
            }),
            "clip_scale: clip must not be negative; got -1; 0 turns clipping off");
  UpdatedTensor t{
      .param_n = x.tensor(), .master_n = x.tensor(), .m_n = x.tensor(), .v_n = x.tensor(), .grad_n = y.tensor()};
  AdamW a{.tensors = {&t, 1}, .scale_1 = one.tensor()};
  EXPECT_EQ(testing::error_of([&] { adamw(s_, a); }), "adamw: grad must be f32[4]; got f32[5]");
  t.grad_n = x.tensor();
  a.lr_and_step_2 = y.tensor();
  EXPECT_EQ(testing::error_of([&] { adamw(s_, a); }), "adamw: lr_and_step must be f64[2]; got f32[5]");
  a.lr_and_step_2 = {};
  a.step = 0;
  EXPECT_EQ(testing::error_of([&] { adamw(s_, a); }), "adamw: step counts from 1; got 0");
}

TEST(Optimizer, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({4}), one = testing::null_tensor({1}),
                 sum = testing::null_tensor({1}, DType::f64);
    sum_squares(s, {.sum_1 = sum, .partial_P = sum, .x = {&x, 1}});
    clip_scale(s, {.norm_1 = one, .scale_1 = one, .sum_squares_1 = sum});
    const UpdatedTensor t{
        .param_n = testing::null_tensor({4}, DType::bf16), .master_n = x, .m_n = x, .v_n = x, .grad_n = x};
    adamw(s, {.tensors = {&t, 1}, .scale_1 = one});
  });
  EXPECT_EQ(cost.bytes, 16 + 16 + 4 * 30);
}

}  // namespace
}  // namespace moebius
