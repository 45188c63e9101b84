#include "ops/elementwise/elementwise.h"

#include "ops/cpu/testing.h"
#include "ops/elementwise/elementwise_ref.h"
#include "ops/elementwise/fill_zeros.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

class ElementwiseTest : public testing::DeviceTest<DType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, ElementwiseTest,
                         ::testing::ValuesIn(testing::on_each_device<DType>({DType::f32, DType::bf16})));

TEST_P(ElementwiseTest, FillZeroCopyAdd) {
  for (const int64_t n : {0, 1, 7, 70001, 70016}) {
    Array x = Array::normal({n}, c(), 1), y = Array::normal({n}, c(), 2), zero = Array::poisoned({n}, c());
    Array f32 = Array::poisoned({n}, DType::f32), back = Array::poisoned({n}, c()), same = back;
    fill_zero(s_, zero.tensor());
    EXPECT_EQ(zero.values(), Values(n, 0.0));
    copy(s_, f32.tensor(), x.tensor());
    EXPECT_EQ(f32.values(), x.values());
    copy(s_, back.tensor(), f32.tensor());
    EXPECT_EQ(back.bytes(), x.bytes());
    copy(s_, same.tensor(), x.tensor());
    EXPECT_EQ(same.bytes(), x.bytes());
    Values want = y.values();
    const Values terms = x.values();
    for (int64_t i = 0; i < n; ++i) want[i] += terms[i];
    add(s_, y.tensor(), x.tensor());
    testing::expect_close("add", y.values(), want, testing::epsilon(c()), 0);
  }
}

// More tensors than a launch has: empty, odd, unaligned, aligned and large ones, each between poisoned elements.
TEST_P(ElementwiseTest, FillZerosClearsTheseTensorsOnly) {
  std::vector<Array> arrays;
  std::vector<Tensor> cleared;
  const auto edge = [](int64_t i) { return i % 2 == 0 ? 1 : 8; };
  for (int64_t i = 0; i < 130; ++i) {
    const int64_t n = i == 7 ? 5 << 19 : i % 2 == 0 ? i * i % 977 : i * 256;
    arrays.push_back(Array::poisoned({n + 2 * edge(i)}, c()));
  }
  for (int64_t i = 0; i < 130; ++i) {
    const Tensor all = arrays[i].tensor();
    cleared.push_back(all.rows(edge(i), all.dim(0) - edge(i)));
  }
  cleared.push_back({});
  fill_zeros(s_, cleared);
  for (int64_t i = 0; i < 130; ++i) {
    const Values got = arrays[i].values();
    const auto begin = got.begin() + edge(i), end = got.end() - edge(i);
    EXPECT_TRUE(std::isnan(*(begin - 1)) && std::isnan(*end)) << i;
    EXPECT_TRUE(std::all_of(begin, end, [](double x) { return x == 0; })) << i;
  }
}

TEST_P(ElementwiseTest, GatedAddEqualsTheReference) {
  for (const auto& [rows, width] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {1, 1}, {67, 5}, {3, 129}, {5, 2064}}) {
    Array x = Array::normal({rows, width}, c(), 1), y = Array::normal({rows, width}, c(), 2),
          dy = Array::normal({rows, width}, c(), 3);
    Array gate = Array::normal({rows}, DType::f32, 4), dx = Array::poisoned({rows, width}, c()),
          dgate = Array::poisoned({rows}, DType::f32);
    Values want = y.values(), want_dx, want_dgate;
    ref::gated_add_fwd(want, x.values(), gate.values());
    ref::gated_add_bwd(want_dx, want_dgate, dy.values(), x.values(), gate.values());
    gated_add_fwd(s_, {.y_TD = y.tensor(), .x_TD = x.tensor(), .gate_T = gate.tensor()});
    gated_add_bwd(s_, {.dx_TD = dx.tensor(),
                       .dgate_T = dgate.tensor(),
                       .dy_TD = dy.tensor(),
                       .x_TD = x.tensor(),
                       .gate_T = gate.tensor()});
    // One rounding to the dtype; dgate is an f32 sum of D terms.
    const double eps32 = testing::epsilon(DType::f32), error = testing::epsilon(c()) + 4 * eps32;
    testing::expect_close("y", y.values(), want, error, 1e-7);
    testing::expect_close("dx", dx.values(), want_dx, error, 1e-7);
    testing::expect_close("dgate", dgate.values(), want_dgate, 4 * eps32, 4 * eps32 * std::sqrt(width));
  }
}

TEST(GatedAdd, ReferenceBackwardEqualsFiniteDifferences) {
  const Values x = Array::normal({3, 5}, DType::f32, 1).values(), dy = Array::normal({3, 5}, DType::f32, 2).values(),
               gate = {0.3, -1, 2};
  Values dx, dgate;
  ref::gated_add_bwd(dx, dgate, dy, x, gate);
  const auto loss = [&](const Values& at_x, const Values& at_gate) {
    Values y(15);
    ref::gated_add_fwd(y, at_x, at_gate);
    return testing::dot(dy, y);
  };
  testing::expect_gradient(
      "dx", [&](const Values& v) { return loss(v, gate); }, x, dx);
  testing::expect_gradient(
      "dgate", [&](const Values& v) { return loss(x, v); }, gate, dgate);
}

TEST(SumInto, AddsAScaledSumInDouble) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::normal({3001}, DType::f32, 1), out = Array::of({1}, DType::f64, {2.5}), none({0}, DType::f32);
    double want = 2.5;
    for (const double v : x.values()) want += 0.25 * v;
    sum_into(s, {.out_1 = out.tensor(), .x = x.tensor(), .scale = 0.25});
    sum_into(s, {.out_1 = out.tensor(), .x = none.tensor()});
    EXPECT_NEAR(out.values()[0], want, 1e-11);
  });
}

TEST(AddRow, AddsItToEachRow) {
  testing::on_each_device([](Stream& s) {
    Array y = Array::normal({300, 7}, DType::f32, 1), row = Array::normal({1, 7}, DType::f32, 2);
    Values want = y.values();
    const Values terms = row.values();
    for (int64_t i = 0; i < 2100; ++i) want[i] = static_cast<float>(want[i] + terms[i % 7]);
    add_row(s, y.tensor(), row.tensor());
    EXPECT_EQ(y.values(), want);
  });
}

// Widths of whole vectors and others.
TEST(AddRow, RoundsOnceInBf16) {
  testing::on_each_device([](Stream& s) {
    for (const int64_t width : {7, 40}) {
      Array y = Array::normal({300, width}, DType::bf16, 1), row = Array::normal({1, width}, DType::bf16, 2);
      Values want = y.values();
      const Values terms = row.values();
      for (int64_t i = 0; i < 300 * width; ++i)
        want[i] = to_f32(to_bf16(static_cast<float>(want[i]) + static_cast<float>(terms[i % width])));
      add_row(s, y.tensor(), row.tensor());
      EXPECT_EQ(y.values(), want);
    }
  });
}

// Fewer rows than a block has, whole blocks, and a part of one.
TEST_P(ElementwiseTest, SumRowsAddsToTheSum) {
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{0, 5}, {3, 33}, {256, 8}, {1000, 264}, {777, 300}}) {
    Array x = Array::normal({rows, width}, c(), 1), sum = Array::normal({width}, DType::f32, 2);
    Values want = sum.values();
    const Values terms = x.values();
    for (int64_t i = 0; i < rows * width; ++i) want[i % width] += terms[i];
    SumRows a{.sum_C = sum.tensor(), .x_TC = x.tensor()};
    Array scratch = Array::poisoned({SumRows::scratch_bytes(a) / 4}, DType::f32);
    a.scratch = scratch.tensor();
    sum_rows(s_, a);
    synchronize(s_);
    // The terms are of size 1: sums of n of them are rounded by eps sqrt(n) or less.
    const Values got = sum.values();
    for (int64_t c = 0; c < width; ++c) EXPECT_NEAR(got[c], want[c], 1.2e-7 * (30 + static_cast<double>(rows))) << c;
  }
}

TEST_P(ElementwiseTest, JitterAndNormalAreFunctionsOfTheGlobalIndex) {
  const int64_t step = (int64_t{5} << 32) + 3;
  const Rng rng(7, RngSite::jitter, static_cast<uint64_t>(step), 2);
  Array x = Array::normal({101, 1}, c(), 1), y = Array::poisoned({101, 1}, c()), part = Array::poisoned({8, 5}, c());
  Array z = Array::poisoned({5000}, c()), draw({2}, DType::i64);
  draw.tensor().ptr<int64_t>()[0] = step;
  draw.tensor().ptr<int64_t>()[1] = 1000;
  Jitter a{.y_TD = y.tensor(), .x_TD = x.tensor(), .draw_2 = draw.tensor(), .seed = 7, .layer = 2, .eps = 0.25f};
  jitter(s_, a);
  synchronize(s_);
  // The same elements as tokens of five: token 206 begins with element 1030.
  draw.tensor().ptr<int64_t>()[1] = 200;
  a.y_TD = part.tensor(), a.x_TD = x.tensor().rows(30, 70).view({8, 5}), a.row = 6;
  jitter(s_, a);
  fill_normal(s_, {.x = z.tensor(), .rng = rng, .first_index = 9, .mean = 2, .std = 0.5f});
  Values want(101), want_z(5000);
  const Values before = x.values();
  for (int i = 0; i < 101; ++i) want[i] = before[i] * (0.75 + 0.5 * rng.uniform(1000 + i));
  for (int i = 0; i < 5000; ++i) want_z[i] = 2 + 0.5 * rng.normal(9 + i);
  const double error = testing::epsilon(c()) + 2 * testing::epsilon(DType::f32);
  testing::expect_close("jitter", y.values(), want, error, 0);
  testing::expect_close("normal", z.values(), want_z, error, 0);
  synchronize(s_);
  EXPECT_EQ(std::memcmp(part.tensor().data, y.tensor().rows(30, 70).data, part.bytes().size()), 0);
}

TEST_P(ElementwiseTest, FindNonfiniteGivesTheFirst) {
  Values v(200000, 1.0);
  Array clean = Array::of({200000}, c(), v), none({0}, c());
  EXPECT_EQ(find_nonfinite(s_, clean.tensor()), -1);
  EXPECT_EQ(find_nonfinite(s_, none.tensor()), -1);
  v[199999] = std::numeric_limits<double>::infinity();
  v[70007] = std::numeric_limits<double>::quiet_NaN();
  Array dirty = Array::of({200000}, c(), v);
  EXPECT_EQ(find_nonfinite(s_, dirty.tensor()), 70007);
  EXPECT_EQ(find_nonfinite(s_, dirty.tensor().rows(70008, 200000)), 199999 - 70008);
}

TEST(Elementwise, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array x = Array::normal({131, 1000}, DType::bf16, 1), y({131, 1000}, DType::bf16),
          gate = Array::normal({131}, DType::f32, 2), dgate = gate;
    fill_normal(s, {.x = y.tensor(), .rng = Rng(1, RngSite::init)});
    gated_add_fwd(s, {.y_TD = y.tensor(), .x_TD = x.tensor(), .gate_T = gate.tensor()});
    gated_add_bwd(s, {.dx_TD = x.tensor(),
                      .dgate_T = dgate.tensor(),
                      .dy_TD = y.tensor(),
                      .x_TD = x.tensor(),
                      .gate_T = gate.tensor()});
    add(s, y.tensor(), x.tensor());
    return std::vector<Array>{x, y, dgate};
  });
}

TEST(Elementwise, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 3}, DType::f32), y({3, 4}, DType::f32), i({4, 3}, DType::i32), gate({3}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { copy(s, y.tensor(), x.tensor()); }), "copy: to must be f32[4, 3]; got f32[3, 4]");
  EXPECT_EQ(testing::error_of([&] { copy(s, x.tensor(), i.tensor()); }),
            "copy: from must be f32 or bf16; got i32[4, 3]");
  EXPECT_EQ(testing::error_of([&] { add(s, i.tensor(), i.tensor()); }), "add: x must be f32 or bf16; got i32[4, 3]");
  EXPECT_EQ(
      testing::error_of([&] { gated_add_fwd(s, {.y_TD = x.tensor(), .x_TD = x.tensor(), .gate_T = gate.tensor()}); }),
      "gated_add_fwd: gate must be f32[4]; got f32[3]");
  EXPECT_EQ(testing::error_of([&] { gated_add_fwd(s, {.x_TD = gate.tensor()}); }),
            "gated_add_fwd: x must be [T, D]; got f32[3]");
  Tensor lost = x.tensor();
  lost.data = nullptr;
  EXPECT_EQ(testing::error_of([&] { fill_zero(s, lost); }), "fill_zero: x f32[4, 3] has no memory");
}

TEST(Elementwise, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({3, 4}), gate = testing::null_tensor({3});
    const Tensor draw = testing::null_tensor({2}, DType::i64);
    fill_zero(s, x);
    copy(s, x, x);
    add(s, x, x);
    sum_into(s, {.out_1 = testing::null_tensor({1}, DType::f64), .x = gate});
    gated_add_fwd(s, {.y_TD = x, .x_TD = x, .gate_T = gate});
    gated_add_bwd(s, {.dx_TD = x, .dgate_T = gate, .dy_TD = x, .x_TD = x, .gate_T = gate});
    jitter(s, {.y_TD = x, .x_TD = x, .draw_2 = draw});
    fill_normal(s, {.x = x, .rng = Rng(1, RngSite::init)});
    EXPECT_EQ(find_nonfinite(s, x), -1);
  });
  EXPECT_EQ(cost.bytes, 4 * (12 * (1 + 2 + 3 + 3 + 3 + 2 + 1 + 1) + 3 * (1 + 1 + 2)));
}

}  // namespace
}  // namespace moebius
