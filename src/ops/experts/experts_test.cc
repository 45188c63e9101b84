#include "ops/experts/experts.h"

#include <gmock/gmock.h>

#include <numeric>

#include "device/block_limit.h"
#include "device/fallback_kernels.h"
#include "ops/cpu/testing.h"
#include "ops/experts/experts_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  std::string name;
  int64_t T, D, F;
  std::vector<int64_t> counts;  // rows of each expert
  int64_t spare = 0;            // rows past the last one
  bool gather = true;
  DType dtype = DType::f32;
  bool gpt_oss = false;  // biases, b2 of some columns alone, and the clamped activation
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<int64_t> half_empty(int64_t num_experts) {
  std::vector<int64_t> counts(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) counts[e] = e % 2 * (e % 5);
  return counts;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::string d = std::string("_") + std::string(name_of(dtype));
    all.push_back({"empty" + d, 3, 5, 4, {0, 0}, 0, true, dtype});
    all.push_back({"only_spare" + d, 3, 5, 4, {0, 0, 0}, 2, true, dtype});
    all.push_back({"one" + d, 1, 1, 1, {1}, 0, true, dtype});
    all.push_back({"odd" + d, 9, 33, 17, {0, 5, 1, 0, 17, 14}, 3, true, dtype});
    all.push_back({"in_place" + d, 40, 7, 50, {3, 0, 30}, 7, false, dtype});
    all.push_back({"all_to_one" + d, 31, 64, 32, {0, 60, 0}, 0, true, dtype});
    all.push_back({"many_rows" + d, 50, 6, 5, {1030, 2}, 1, true, dtype});
    all.push_back({"wide" + d, 5, 100, 70, {3, 2}, 0, true, dtype});
    all.push_back({"many_tasks_across" + d, 2, 4200, 40, {2}, 0, true, dtype});
    all.push_back({"many_tasks_back" + d, 2, 65, 2800, {1}, 0, true, dtype});
    // Rows, columns and depth of more than one tile of the widest kernels, ragged in each.
    all.push_back({"tiles" + d, 150, 200, 136, {0, 130, 3, 257, 64}, 5, true, dtype});
    all.push_back({"tiles_in_place" + d, 150, 136, 328, {129, 0, 40}, 5, false, dtype});
    all.push_back({"tiles_deep" + d, 60, 1160, 24, {5, 150, 1, 130}, 0, true, dtype});
    all.push_back({"tiles_deep_back" + d, 20, 72, 1096, {140, 20}, 0, true, dtype});
    all.push_back({"all_empty" + d, 3, 64, 64, {0, 0}, 0, true, dtype});
    all.push_back({"all_empty_in_place" + d, 3, 64, 64, {0, 0}, 0, false, dtype});
    all.push_back({"all_spare" + d, 3, 64, 64, {0, 0}, 70, true, dtype});
    all.push_back({"one_expert_one_token" + d, 1, 64, 64, {1}, 0, true, dtype});
    all.push_back({"narrow" + d, 70, 8, 8, {65, 0, 5}, 0, true, dtype});
    all.push_back({"many_experts" + d, 30, 16, 8, half_empty(512), 0, true, dtype});
    all.push_back({"many_tiles" + d, 90, 136, 264, {300, 0, 257, 1, 128}, 5, true, dtype});
    all.push_back({"gpt_oss" + d, 9, 39, 17, {0, 5, 1, 0, 17, 14}, 3, true, dtype, true});
    all.push_back({"gpt_oss_in_place" + d, 40, 7, 50, {3, 0, 30}, 7, false, dtype, true});
    all.push_back({"gpt_oss_tiles" + d, 150, 200, 136, {0, 130, 3, 257, 64}, 5, true, dtype, true});
    all.push_back({"gpt_oss_empty" + d, 3, 5, 4, {0, 0}, 2, true, dtype, true});
  }
  return all;
}

// The data of a case: one of each tensor, x and dout by token.
struct Problem {
  explicit Problem(const Case& c) : c(c) {
    R = std::accumulate(c.counts.begin(), c.counts.end(), c.spare);
    shape = {c.T, c.D, c.F, {0}, {}};
    for (const int64_t n : c.counts) shape.offsets.push_back(shape.offsets.back() + n);
    for (int64_t r = 0; r < R && c.gather; ++r) shape.token.push_back((r * 7 + 3) % c.T);
    offsets = Array::of_ints({E() + 1}, {shape.offsets.begin(), shape.offsets.end()});
    if (c.gather) token = Array::of_ints({R}, {shape.token.begin(), shape.token.end()});
    const double wide = 1 / std::sqrt(static_cast<double>(c.D)), deep = 1 / std::sqrt(static_cast<double>(c.F));
    x = Array::normal({c.gather ? c.T : R, c.D}, c.dtype, 1);
    w1 = Array::normal({E(), 2 * c.F, c.D}, c.dtype, 2, wide);
    w2 = Array::normal({E(), c.D, c.F}, c.dtype, 3, deep);
    dout = Array::normal({c.gather ? c.T : R, c.D}, c.dtype, 4);
    weight = Array::normal({R}, DType::f32, 5);
    h = Array::normal({R, 2 * c.F}, c.dtype, 6);
    a = Array::normal({R, c.F}, c.dtype, 7);
    if (!c.gpt_oss) return;
    // Limits that cut much off on both sides.
    activation = {.alpha = 1.702f, .limit = 0.75f, .shift = 1.0f};
    ref_activation = {activation.alpha, activation.limit, activation.shift};
    b1 = Array::normal({E(), 2 * c.F}, c.dtype, 10);
    b2_first = c.D / 3;
    b2 = Array::normal({E(), c.D / 2}, c.dtype, 11);
  }
  ref::ColumnBias ref_b2() const { return {b2.values(), b2_first, b2.values().empty() ? 0 : c.D / 2}; }
  int64_t E() const { return static_cast<int64_t>(c.counts.size()); }
  Rows rows() { return {offsets.tensor(), token.tensor()}; }

  Case c;
  int64_t R;
  ref::ExpertShape shape;
  Array offsets, token, x, w1, w2, dout, weight, h, a, b1, b2;
  int64_t b2_first = 0;
  GatedActivation activation;
  ref::Activation ref_activation;
};

template <class Op>
void run(Stream& s, void (*op)(Stream&, const Op&), Op a) {
  testing::SharedBytes scratch(Op::scratch_bytes(a, s) + 64);
  std::memset(scratch.data(), 0xff, scratch.num_bytes());
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  a.scratch = {.data = aligned, .shape = {scratch.num_bytes() - 64}, .dtype = DType::u8};
  op(s, a);
  scratch.settle();
}

struct Outputs {
  Array h, a, y, dh, sa, dweight, dx, dw1, dw2, db1, db2;
  std::vector<Array> all() const { return {h, a, y, dh, sa, dweight, dx, dw1, dw2, db1, db2}; }
  // Those that have a row, or an element, for each row.
  std::vector<std::pair<const char*, const Array*>> of_rows() const {
    return {{"h", &h}, {"a", &a}, {"y", &y}, {"dh", &dh}, {"sa", &sa}, {"dweight", &dweight}, {"dx", &dx}};
  }
};

// Every op on the problem's own inputs, none on another's output.
Outputs run_all(Stream& s, Problem& p) {
  const DType t = p.c.dtype;
  const int64_t D = p.c.D, F = p.c.F, R = p.R;
  Outputs o{.h = Array::poisoned({R, 2 * F}, t),
            .a = Array::poisoned({R, F}, t),
            .y = Array::poisoned({R, D}, t),
            .dh = Array::poisoned({R, 2 * F}, t),
            .sa = Array::poisoned({R, F}, t),
            .dweight = Array::poisoned({R}, DType::f32),
            .dx = Array::poisoned({R, D}, t),
            .dw1 = Array::normal({p.E(), 2 * F, D}, DType::f32, 8),
            .dw2 = Array::normal({p.E(), D, F}, DType::f32, 9),
            .db1 = Array::normal({p.E(), 2 * F}, DType::f32, 12),
            .db2 = Array::normal({p.E(), D / 2}, DType::f32, 13)};
  run<ExpertUp>(s, expert_up,
                {.h_R2F = o.h.tensor(),
                 .a_RF = o.a.tensor(),
                 .x_TD = p.x.tensor(),
                 .w1_e2FD = p.w1.tensor(),
                 .b1_e2F = p.b1.tensor(),
                 .rows = p.rows(),
                 .activation = p.activation});
  run<ExpertDown>(s, expert_down,
                  {.y_RD = o.y.tensor(),
                   .a_RF = p.a.tensor(),
                   .w2_eDF = p.w2.tensor(),
                   .b2_eC = p.b2.tensor(),
                   .b2_first = p.b2_first,
                   .rows = p.rows()});
  run<DExpertDown>(s, d_expert_down,
                   {.dh_R2F = o.dh.tensor(),
                    .sa_RF = o.sa.tensor(),
                    .dweight_R = o.dweight.tensor(),
                    .dout_TD = p.dout.tensor(),
                    .w2_eDF = p.w2.tensor(),
                    .b2_eC = p.b2.tensor(),
                    .h_R2F = p.h.tensor(),
                    .weight_R = p.weight.tensor(),
                    .b2_first = p.b2_first,
                    .rows = p.rows(),
                    .activation = p.activation});
  run<DExpertUp>(s, d_expert_up,
                 {.dx_RD = o.dx.tensor(), .dh_R2F = p.h.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()});
  run<ExpertWgrad>(s, expert_wgrad,
                   {.dw_eMN = o.dw1.tensor(),
                    .left_RM = p.h.tensor(),
                    .right_RN = p.x.tensor(),
                    .gather_right = p.c.gather,
                    .rows = p.rows()});
  run<ExpertWgrad>(s, expert_wgrad,
                   {.dw_eMN = o.dw2.tensor(),
                    .left_RM = p.dout.tensor(),
                    .right_RN = p.a.tensor(),
                    .gather_left = p.c.gather,
                    .rows = p.rows()});
  expert_bias_grad(s, {.db_eN = o.db1.tensor(), .x_RM = p.h.tensor(), .rows = p.rows()});
  expert_bias_grad(s, {.db_eN = o.db2.tensor(),
                       .x_RM = p.dout.tensor(),
                       .weight_R = p.weight.tensor(),
                       .x_first = p.c.D / 3,
                       .gather = p.c.gather,
                       .rows = p.rows()});
  return o;
}

class ExpertsTest : public testing::DeviceTest<Case> {};
class ExpertsOfFewBlocksTest : public testing::DeviceTest<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExpertsOfFewBlocksTest);  // without a GPU
class ExpertsTeamTest : public ::testing::TestWithParam<Case> {};

// The rows that exist are close to the reference; the others were not written.
void expect_rows(const Case& c, const char* what, const Array& got, Values want, int64_t num_rows, double length) {
  Values values = got.values();
  const auto written = static_cast<size_t>(
      num_rows == 0 ? 0 : num_rows * static_cast<int64_t>(values.size()) / static_cast<int64_t>(num_rows + c.spare));
  for (size_t i = written; i < values.size(); ++i) ASSERT_TRUE(std::isnan(values[i])) << what << " at " << i;
  values.resize(written);
  want.resize(written);
  // Sums of `length` products err by eps32 sqrt(length) of their magnitude; a product of rounded factors by 2 eps each.
  testing::expect_close(what, values, want, 2 * testing::epsilon(c.dtype) + 0x1p-22 * std::sqrt(length), 1e-6);
}

void expect_reference(const Case& c, const Problem& p, const Outputs& o) {
  const int64_t rows = p.R - c.spare;
  expect_rows(c, "h", o.h, ref::expert_h(p.shape, p.x.values(), p.w1.values(), p.R, p.b1.values()), rows, c.D);
  // a is defined by h as rounded.
  expect_rows(c, "a", o.a, ref::gated_rows(o.h.values(), p.R, c.F, p.ref_activation), rows, 1);
  expect_rows(c, "y", o.y, ref::expert_y(p.shape, p.a.values(), p.w2.values(), p.R, p.ref_b2()), rows, c.F);
  const ref::ExpertBackward b = ref::d_expert_down(p.shape, p.dout.values(), p.w2.values(), p.h.values(),
                                                   p.weight.values(), p.R, p.ref_activation, p.ref_b2());
  expect_rows(c, "dh", o.dh, b.dh, rows, c.D);
  expect_rows(c, "sa", o.sa, b.sa, rows, 1);
  expect_rows(c, "dweight", o.dweight, b.dweight, rows, c.D + c.F);
  expect_rows(c, "dx", o.dx, ref::d_expert_up(p.shape, p.h.values(), p.w1.values(), p.R), rows, 2 * c.F);
  Values dw1 = Array::normal({p.E(), 2 * c.F, c.D}, DType::f32, 8).values();
  Values dw2 = Array::normal({p.E(), c.D, c.F}, DType::f32, 9).values();
  ref::expert_wgrad(p.shape, dw1, p.h.values(), p.x.values(), 2 * c.F, c.D, false, c.gather);
  ref::expert_wgrad(p.shape, dw2, p.dout.values(), p.a.values(), c.D, c.F, c.gather, false);
  const double error = 0x1p-22 * std::sqrt(static_cast<double>(rows + 1));
  testing::expect_close("dw1", o.dw1.values(), dw1, error, 1e-6);
  testing::expect_close("dw2", o.dw2.values(), dw2, error, 1e-6);
  Values db1 = Array::normal({p.E(), 2 * c.F}, DType::f32, 12).values();
  Values db2 = Array::normal({p.E(), c.D / 2}, DType::f32, 13).values();
  ref::expert_bias_grad(p.shape, db1, p.h.values(), 2 * c.F, 0, {}, false);
  ref::expert_bias_grad(p.shape, db2, p.dout.values(), c.D, c.D / 3, p.weight.values(), c.gather);
  testing::expect_close("db1", o.db1.values(), db1, error, 1e-6);
  testing::expect_close("db2", o.db2.values(), db2, error, 1e-6);
}

TEST_P(ExpertsTest, EqualsTheReference) {
  Problem p(c());
  expect_reference(c(), p, run_all(s_, p));
}

// Each block walks over many tiles: what it does for one under the next one's products, notes that go round, a tile
// that is cut. Only the weight gradients depend on who computes what, by the order of their sums.
TEST_P(ExpertsOfFewBlocksTest, EqualTheReference) {
  Problem p(c());
  const Outputs all = run_all(s_, p);
  for (const int blocks : {2, 6}) {
    SCOPED_TRACE(fmt::format("{} blocks", blocks));
    const BlockLimitScope few(s_, blocks);
    const Outputs o = run_all(s_, p);
    expect_reference(c(), p, o);
    const auto by_few = o.of_rows(), by_all = all.of_rows();
    for (size_t i = 0; i < by_few.size(); ++i)
      EXPECT_EQ(by_few[i].second->bytes(), by_all[i].second->bytes()) << by_few[i].first;
    const Outputs again = run_all(s_, p);
    EXPECT_EQ(again.dw1.bytes(), o.dw1.bytes());
    EXPECT_EQ(again.dw2.bytes(), o.dw2.bytes());
  }
}

TEST(Experts, WhatRunsOnSlowerKernelsIsNoted) {
  if (testing::accelerator() == nullptr) GTEST_SKIP() << "there is no GPU";
  ThreadPool pool(1);
  Accelerator gpu;  // of its own: nothing was noted on it
  Stream s(gpu, pool);
  const auto& slow = gpu.state<FallbackKernels>().why;
  Problem fast({"fast", 9, 32, 16, {5, 4}, 0, true, DType::bf16});
  run_all(s, fast);
  EXPECT_THAT(slow, ::testing::IsEmpty());
  Problem odd({"odd", 9, 33, 17, {5, 4}, 0, true, DType::bf16});
  run_all(s, odd);
  EXPECT_EQ(slow.size(), 5);
  EXPECT_THAT(slow.at("expert_up"), ::testing::HasSubstr("multiples of 8"));
  EXPECT_THAT(slow.at("expert_up"), ::testing::HasSubstr("[2, 34, 33]"));
}

TEST_P(ExpertsTeamTest, SameBits) {
  Problem p(GetParam());
  testing::expect_same_bits_for_any_team([&](Stream& s) { return run_all(s, p).all(); });
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });
std::vector<testing::On<Case>> cases_of_few_blocks() {
  std::vector<testing::On<Case>> few = testing::on_each_device(cases());
  std::erase_if(few, [](const testing::On<Case>& on) {
    return on.device != DeviceKind::cuda || on.c.dtype != DType::bf16 || on.c.D % 8 + on.c.F % 8 != 0 || on.c.gpt_oss;
  });
  return few;
}
INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsOfFewBlocksTest, ::testing::ValuesIn(cases_of_few_blocks()),
                         [](const auto& info) { return info.param.c.name + "_cuda"; });
INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsTeamTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// sum of probe . y, y[t,:] = sum over the rows of t of weight (w2 a): every gradient by chaining the ops, in f32.
void expect_chained_gradients(Stream& s, bool gpt_oss) {
  Problem p({"gradient", 5, 6, 4, {3, 0, 5, 2}, 0, true, DType::f32, gpt_oss});
  const ref::ExpertShape& shape = p.shape;
  const Values probe = p.dout.values();
  Values b1 = p.b1.values();
  ref::ColumnBias b2 = p.ref_b2();
  const auto loss = [&](const Values& x, const Values& w1, const Values& w2, const Values& weight) {
    const Values a = ref::gated_rows(ref::expert_h(shape, x, w1, p.R, b1), p.R, p.c.F, p.ref_activation);
    const Values y = ref::expert_y(shape, a, w2, p.R, b2);
    double sum = 0;
    for (int64_t i = 0; i < p.R * p.c.D; ++i) {
      const int64_t r = i / p.c.D;
      sum += weight[r] * y[i] * probe[shape.source(r) * p.c.D + i % p.c.D];
    }
    return sum;
  };
  const DType f32 = DType::f32;
  Array h({p.R, 2 * p.c.F}, f32), a({p.R, p.c.F}, f32), dh({p.R, 2 * p.c.F}, f32), sa({p.R, p.c.F}, f32);
  Array dweight({p.R}, f32), dxrow({p.R, p.c.D}, f32), dw1({4, 8, 6}, f32), dw2({4, 6, 4}, f32);
  run<ExpertUp>(s, expert_up,
                {.h_R2F = h.tensor(),
                 .a_RF = a.tensor(),
                 .x_TD = p.x.tensor(),
                 .w1_e2FD = p.w1.tensor(),
                 .b1_e2F = p.b1.tensor(),
                 .rows = p.rows(),
                 .activation = p.activation});
  run<DExpertDown>(s, d_expert_down,
                   {.dh_R2F = dh.tensor(),
                    .sa_RF = sa.tensor(),
                    .dweight_R = dweight.tensor(),
                    .dout_TD = p.dout.tensor(),
                    .w2_eDF = p.w2.tensor(),
                    .b2_eC = p.b2.tensor(),
                    .h_R2F = h.tensor(),
                    .weight_R = p.weight.tensor(),
                    .b2_first = p.b2_first,
                    .rows = p.rows(),
                    .activation = p.activation});
  run<DExpertUp>(s, d_expert_up,
                 {.dx_RD = dxrow.tensor(), .dh_R2F = dh.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()});
  run<ExpertWgrad>(s, expert_wgrad,
                   {.dw_eMN = dw1.tensor(),
                    .left_RM = dh.tensor(),
                    .right_RN = p.x.tensor(),
                    .gather_right = true,
                    .rows = p.rows()});
  run<ExpertWgrad>(s, expert_wgrad,
                   {.dw_eMN = dw2.tensor(),
                    .left_RM = p.dout.tensor(),
                    .right_RN = sa.tensor(),
                    .gather_left = true,
                    .rows = p.rows()});
  Values dx(p.c.T * p.c.D);
  for (int64_t i = 0; i < p.R * p.c.D; ++i) dx[shape.source(i / p.c.D) * p.c.D + i % p.c.D] += dxrow.values()[i];

  const Values x = p.x.values(), w1 = p.w1.values(), w2 = p.w2.values(), weight = p.weight.values();
  const auto expect = [&](const char* what, Values at, const Values& gradient, auto&& with) {
    Values differences(at.size());
    for (size_t i = 0; i < at.size(); ++i) {
      const double step = 1e-5, old = at[i];
      at[i] = old + step;
      const double above = with(at);
      at[i] = old - step;
      differences[i] = (above - with(at)) / (2 * step);
      at[i] = old;
    }
    testing::expect_close(what, gradient, differences, 1e-5, 1e-6);
  };
  expect("dx", x, dx, [&](const Values& v) { return loss(v, w1, w2, weight); });
  expect("dw1", w1, dw1.values(), [&](const Values& v) { return loss(x, v, w2, weight); });
  expect("dw2", w2, dw2.values(), [&](const Values& v) { return loss(x, w1, v, weight); });
  expect("dweight", weight, dweight.values(), [&](const Values& v) { return loss(x, w1, w2, v); });
  if (!gpt_oss) return;
  Array db1 = Array::of({4, 8}, f32, Values(32)), db2 = Array::of({4, 3}, f32, Values(12));
  expert_bias_grad(s, {.db_eN = db1.tensor(), .x_RM = dh.tensor(), .rows = p.rows()});
  expert_bias_grad(s, {.db_eN = db2.tensor(),
                       .x_RM = p.dout.tensor(),
                       .weight_R = p.weight.tensor(),
                       .x_first = p.b2_first,
                       .gather = true,
                       .rows = p.rows()});
  expect("db1", p.b1.values(), db1.values(), [&](const Values& v) {
    b1 = v;
    return loss(x, w1, w2, weight);
  });
  b1 = p.b1.values();
  expect("db2", p.b2.values(), db2.values(), [&](const Values& v) {
    b2.b = v;
    return loss(x, w1, w2, weight);
  });
}

TEST(Experts, ChainedBackwardIsTheGradientOfTheWholeForward) {
  for (const bool gpt_oss : {false, true}) {
    SCOPED_TRACE(gpt_oss ? "biases, clamped activation" : "SwiGLU");
    testing::on_each_device([&](Stream& s) { expect_chained_gradients(s, gpt_oss); });
  }
}

// A row alone has the bits that it has among others, whoever shares its expert and its tile.
TEST(Experts, RowsDoNotDependOnOtherRows) {
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Problem many({"many", 40, 35, 19, {0, 33}, 0, true, dtype});
    const Outputs all = run_all(s, many);
    for (const int64_t row : {0, 13, 14, 32}) {
      Problem one({"one", 40, 35, 19, {0, 1}, 0, true, dtype});
      one.w1 = many.w1, one.w2 = many.w2;
      one.token = Array::of_ints({1}, {static_cast<int32_t>(many.shape.token[row])});
      const auto row_of = [&](Array& to, Array& from) {
        std::memcpy(to.tensor().data, from.tensor().rows(row, row + 1).data, to.bytes().size());
      };
      row_of(one.h, many.h), row_of(one.a, many.a), row_of(one.weight, many.weight);
      const Outputs alone = run_all(s, one);
      const auto of_one = alone.of_rows(), among = all.of_rows();
      for (size_t i = 0; i < of_one.size(); ++i) {
        const std::vector<unsigned char> got = of_one[i].second->bytes(), whole = among[i].second->bytes();
        EXPECT_EQ(std::memcmp(got.data(), whole.data() + row * got.size(), got.size()), 0)
            << of_one[i].first << " of row " << row;
      }
    }
  }
}

TEST(Experts, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Problem p({"errors", 3, 5, 4, {1, 2}});
  Array h({3, 8}, DType::f32), a({3, 4}, DType::f32), y({3, 5}, DType::f32), i({3, 5}, DType::i32),
      dweight({3}, DType::f32);
  ExpertUp up{
      .h_R2F = h.tensor(), .a_RF = a.tensor(), .x_TD = p.x.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()};
  const auto error = [&](Stream& on, const ExpertUp& args) {
    return testing::error_of([&] { run<ExpertUp>(on, expert_up, args); });
  };
  ExpertUp bad = up;
  bad.x_TD = i.tensor();
  EXPECT_EQ(error(s, bad), "expert_up: x must be an f32 or bf16 matrix; got i32[3, 5]");
  bad = up;
  bad.w1_e2FD = p.w2.tensor();
  EXPECT_EQ(error(s, bad), "expert_up: w1 must be f32[2, 8, 5]; got f32[2, 5, 4]");
  bad.w1_e2FD = a.tensor();
  EXPECT_EQ(error(s, bad), "expert_up: w1 must have the dims of experts, rows and columns; got f32[3, 4]");
  bad = up;
  bad.rows.offsets_e1 = p.token.tensor().view({3}).rows(0, 2);
  EXPECT_EQ(error(s, bad), "expert_up: offsets must be i32[3]; got i32[2]");
  bad = up;
  bad.rows.token_R = p.token.tensor().rows(0, 2);
  EXPECT_EQ(error(s, bad), "expert_up: token must be i32[3]; got i32[2]");
  EXPECT_THAT(testing::error_of([&] { expert_up(s, up); }), ::testing::StartsWith("expert_up: scratch must have "));
  EXPECT_EQ(testing::error_of([&] {
              run<ExpertDown>(s, expert_down,
                              {.y_RD = h.tensor(), .a_RF = a.tensor(), .w2_eDF = p.w2.tensor(), .rows = p.rows()});
            }),
            "expert_down: w2 must be f32[2, 8, 4]; got f32[2, 5, 4]");
  EXPECT_EQ(testing::error_of([&] {
              run<DExpertUp>(s, d_expert_up,
                             {.dx_RD = a.tensor(), .dh_R2F = h.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()});
            }),
            "d_expert_up: w1 must be f32[2, 8, 4]; got f32[2, 8, 5]");
  EXPECT_EQ(testing::error_of([&] {
              run<DExpertDown>(s, d_expert_down,
                               {.dh_R2F = a.tensor(),
                                .sa_RF = a.tensor(),
                                .dweight_R = dweight.tensor(),
                                .dout_TD = p.dout.tensor(),
                                .w2_eDF = p.w2.tensor(),
                                .h_R2F = h.tensor(),
                                .weight_R = dweight.tensor(),
                                .rows = p.rows()});
            }),
            "d_expert_down: dh must be f32[3, 8]; got f32[3, 4]");
  bad = up;
  bad.b1_e2F = a.tensor();
  EXPECT_EQ(error(s, bad), "expert_up: b1 must be f32[2, 8]; got f32[3, 4]");
  EXPECT_EQ(testing::error_of([&] {
              run<ExpertDown>(s, expert_down,
                              {.y_RD = y.tensor(),
                               .a_RF = a.tensor(),
                               .w2_eDF = p.w2.tensor(),
                               .b2_eC = y.tensor(),
                               .b2_first = 1,
                               .rows = p.rows()});
            }),
            "expert_down: b2 must have a row for each expert, of columns from 1 on of 5; got f32[3, 5]");
  EXPECT_EQ(
      testing::error_of([&] { expert_bias_grad(s, {.db_eN = y.tensor(), .x_RM = a.tensor(), .rows = p.rows()}); }),
      "expert_bias_grad: db must have a row for each expert, of columns from 0 on of x f32[3, 4]; got f32[3, 5]");
  Array db({2, 4}, DType::f32);
  EXPECT_EQ(testing::error_of([&] {
              expert_bias_grad(s,
                               {.db_eN = db.tensor(), .x_RM = a.tensor(), .weight_R = db.tensor(), .rows = p.rows()});
            }),
            "expert_bias_grad: weight must be f32[3]; got f32[2, 4]");
  Array dw({2, 8, 5}, DType::f32);
  EXPECT_EQ(testing::error_of([&] {
              run<ExpertWgrad>(s, expert_wgrad,
                               {.dw_eMN = dw.tensor(),
                                .left_RM = h.tensor(),
                                .right_RN = y.tensor(),
                                .gather_right = true,
                                .rows = {p.offsets.tensor(), {}}});
            }),
            "expert_wgrad: a side is gathered, but rows have no token index; got f32[0]");
}

TEST(Experts, NullDeviceCounts) {
  const auto null = [](Shape shape, DType dtype = DType::bf16) { return testing::null_tensor(shape, dtype); };
  const Rows rows{null({3}, DType::i32), null({7}, DType::i32)};
  const Tensor scratch = null({1 << 24}, DType::u8);
  const auto flops = [&](auto&& body) { return testing::cost_on_null(body).flops; };
  EXPECT_EQ(flops([&](Stream& s) {
              expert_up(s, {.h_R2F = null({7, 8}),
                            .a_RF = null({7, 4}),
                            .x_TD = null({5, 6}),
                            .w1_e2FD = null({2, 8, 6}),
                            .rows = rows,
                            .scratch = scratch});
            }),
            2 * 7 * 8 * 6);
  EXPECT_EQ(
      flops([&](Stream& s) {
        expert_down(
            s,
            {.y_RD = null({7, 6}), .a_RF = null({7, 4}), .w2_eDF = null({2, 6, 4}), .rows = rows, .scratch = scratch});
      }),
      2 * 7 * 4 * 6);
  EXPECT_EQ(flops([&](Stream& s) {
              d_expert_up(s, {.dx_RD = null({7, 6}),
                              .dh_R2F = null({7, 8}),
                              .w1_e2FD = null({2, 8, 6}),
                              .rows = rows,
                              .scratch = scratch});
            }),
            2 * 7 * 8 * 6);
  EXPECT_EQ(flops([&](Stream& s) {
              d_expert_down(s, {.dh_R2F = null({7, 8}),
                                .sa_RF = null({7, 4}),
                                .dweight_R = null({7}, DType::f32),
                                .dout_TD = null({5, 6}),
                                .w2_eDF = null({2, 6, 4}),
                                .h_R2F = null({7, 8}),
                                .weight_R = null({7}, DType::f32),
                                .rows = rows,
                                .scratch = scratch});
            }),
            2 * 7 * 4 * 6);
  EXPECT_EQ(flops([&](Stream& s) {
              expert_wgrad(s, {.dw_eMN = null({2, 8, 6}, DType::f32),
                               .left_RM = null({7, 8}),
                               .right_RN = null({5, 6}),
                               .gather_right = true,
                               .rows = rows,
                               .scratch = scratch});
            }),
            2 * 7 * 8 * 6);
}

}  // namespace
}  // namespace moebius
