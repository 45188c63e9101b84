#include "ops/norm/norm.h"

#include "ops/cpu/testing.h"
#include "ops/norm/norm_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t rows, width;
  DType dtype;
  bool residual = false;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool residual : {false, true}) {
      for (const auto& [rows, width] : std::vector<std::pair<int64_t, int64_t>>{
               {0, 5}, {1, 1}, {3, 7}, {5, 64}, {131, 33}, {300, 1056}, {3, 8200}}) {
        all.push_back({rows, width, dtype, residual});
      }
    }
  }
  return all;
}

class RmsNormTest : public testing::DeviceTest<Case> {};

TEST_P(RmsNormTest, ForwardEqualsTheReference) {
  const auto [rows, width, dtype, residual] = c();
  Array x = Array::normal({rows, width}, dtype, 1), w = Array::normal({width}, dtype, 2);
  Array r = residual ? Array::normal({rows, width}, dtype, 3) : Array();
  Array y = Array::poisoned({rows, width}, dtype), rstd = Array::poisoned({rows}, DType::f32);
  Array sum = residual ? Array::poisoned({rows, width}, dtype) : Array();
  const ref::RmsNorm want = ref::rms_norm_fwd(x.values(), r.values(), w.values(), 1e-3);
  rms_norm_fwd(s_, {.y_TD = y.tensor(),
                    .rstd_T = rstd.tensor(),
                    .sum_TD = sum.tensor(),
                    .x_TD = x.tensor(),
                    .residual_TD = r.tensor(),
                    .w_D = w.tensor(),
                    .eps = 1e-3f});
  // Roundings to the dtype: the sum, the normalised row, y. In f32 the sum of squares adds sqrt(D)
  // of its epsilon.
  const double error = 3 * testing::epsilon(dtype) + testing::epsilon(DType::f32) * std::sqrt(width);
  testing::expect_close("y", y.values(), want.y, error, 1e-7);
  testing::expect_close("rstd", rstd.values(), want.rstd, error, 1e-7);
  if (residual) testing::expect_close("sum", sum.values(), want.sum, testing::epsilon(dtype), 1e-7);
}

TEST_P(RmsNormTest, BackwardEqualsTheReference) {
  const auto [rows, width, dtype, residual] = c();
  Array x = Array::normal({rows, width}, dtype, 1), w = Array::normal({width}, dtype, 2),
        dy = Array::normal({rows, width}, dtype, 3);
  Array dx = Array::normal({rows, width}, dtype, 4), dw = Array::normal({width}, DType::f32, 5);
  Array rstd = Array::of({rows}, DType::f32, ref::rms_norm_fwd(x.values(), {}, w.values(), 1e-3).rstd);
  Array partial = Array::poisoned({RmsNormBwd::num_partials(rows, width, s_), width}, DType::f32);
  Values want_dx = dx.values(), want_dw = dw.values();
  ref::rms_norm_bwd(want_dx, want_dw, dy.values(), x.values(), w.values(), 1e-3);
  rms_norm_bwd(s_, {.dx_TD = dx.tensor(),
                    .dw_D = dw.tensor(),
                    .partial_PD = partial.tensor(),
                    .dy_TD = dy.tensor(),
                    .x_TD = x.tensor(),
                    .rstd_T = rstd.tensor(),
                    .w_D = w.tensor()});
  // dx is rounded once; all else is f32, with sums of D (dx) and T (dw) terms of magnitude about 1.
  const double eps32 = testing::epsilon(DType::f32);
  testing::expect_close("dx", dx.values(), want_dx, testing::epsilon(dtype), 4 * eps32 * std::sqrt(width));
  testing::expect_close("dw", dw.values(), want_dw, eps32, 4 * eps32 * std::sqrt(rows));
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST(RmsNorm, ReferenceBackwardEqualsFiniteDifferences) {
  for (const auto& [rows, width] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {3, 5}}) {
    const Values x = Array::normal({rows, width}, DType::f32, 1).values(),
                 w = Array::normal({width}, DType::f32, 2).values();
    const Values dy = Array::normal({rows, width}, DType::f32, 3).values();
    Values dx(x.size()), dw(w.size());
    ref::rms_norm_bwd(dx, dw, dy, x, w, 1e-3);
    testing::expect_gradient(
        "dx", [&](const Values& v) { return testing::dot(dy, ref::rms_norm_fwd(v, {}, w, 1e-3).y); }, x, dx);
    testing::expect_gradient(
        "dw", [&](const Values& v) { return testing::dot(dy, ref::rms_norm_fwd(x, {}, v, 1e-3).y); }, w, dw);
  }
}

TEST(RmsNorm, SumMayBeTheResidual) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::normal({3, 5}, DType::bf16, 1), w = Array::normal({5}, DType::bf16, 2),
          r = Array::normal({3, 5}, DType::bf16, 3);
    Array y({3, 5}, DType::bf16), rstd({3}, DType::f32), sum({3, 5}, DType::bf16), y2 = y;
    rms_norm_fwd(s, {.y_TD = y.tensor(),
                     .rstd_T = rstd.tensor(),
                     .sum_TD = sum.tensor(),
                     .x_TD = x.tensor(),
                     .residual_TD = r.tensor(),
                     .w_D = w.tensor()});
    rms_norm_fwd(s, {.y_TD = y2.tensor(),
                     .rstd_T = rstd.tensor(),
                     .sum_TD = r.tensor(),
                     .x_TD = x.tensor(),
                     .residual_TD = r.tensor(),
                     .w_D = w.tensor()});
    EXPECT_EQ(y.bytes(), y2.bytes());
    EXPECT_EQ(sum.bytes(), r.bytes());
  });
}

TEST(RmsNorm, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array x = Array::normal({300, 33}, DType::bf16, 1), w = Array::normal({33}, DType::bf16, 2),
          dy = Array::normal({300, 33}, DType::bf16, 3);
    Array y({300, 33}, DType::bf16), rstd({300}, DType::f32), dx({300, 33}, DType::bf16), dw({33}, DType::f32);
    Array partial({RmsNormBwd::num_partials(300, 33, s), 33}, DType::f32);
    rms_norm_fwd(s, {.y_TD = y.tensor(), .rstd_T = rstd.tensor(), .x_TD = x.tensor(), .w_D = w.tensor()});
    rms_norm_bwd(s, {.dx_TD = dx.tensor(),
                     .dw_D = dw.tensor(),
                     .partial_PD = partial.tensor(),
                     .dy_TD = dy.tensor(),
                     .x_TD = x.tensor(),
                     .rstd_T = rstd.tensor(),
                     .w_D = w.tensor()});
    return std::vector<Array>{y, rstd, dx, dw};
  });
}

TEST(RmsNorm, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 8}, DType::f32), w({7}, DType::f32), rstd({4}, DType::f32), none({4, 0}, DType::f32);
  EXPECT_EQ(testing::error_of([&] {
              rms_norm_fwd(s, {.y_TD = x.tensor(), .rstd_T = rstd.tensor(), .x_TD = x.tensor(), .w_D = w.tensor()});
            }),
            "rms_norm_fwd: w must be f32[8]; got f32[7]");
  EXPECT_EQ(testing::error_of([&] { rms_norm_fwd(s, {.x_TD = rstd.tensor()}); }),
            "rms_norm_fwd: x must be f32 or bf16 [T, D]; got f32[4]");
  EXPECT_EQ(testing::error_of([&] { rms_norm_fwd(s, {.x_TD = none.tensor()}); }),
            "rms_norm_fwd: x must have columns; got f32[4, 0]");
  EXPECT_EQ(testing::error_of([&] { rms_norm_bwd(s, {.dx_TD = x.tensor(), .dw_D = w.tensor(), .x_TD = x.tensor()}); }),
            "rms_norm_bwd: dw must be f32[8]; got f32[7]");
}

TEST(RmsNorm, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor x = testing::null_tensor({4, 8}), w = testing::null_tensor({8}), rstd = testing::null_tensor({4});
    rms_norm_fwd(s, {.y_TD = x, .rstd_T = rstd, .x_TD = x, .w_D = w});
    rms_norm_bwd(s, {.dx_TD = x,
                     .dw_D = w,
                     .partial_PD = testing::null_tensor({1, 8}),
                     .dy_TD = x,
                     .x_TD = x,
                     .rstd_T = rstd,
                     .w_D = w});
  });
  EXPECT_EQ(cost.flops, 14 * 32);
  EXPECT_EQ(cost.bytes, 4 * (2 * 32 + 4 + 8) + 4 * (4 * 32 + 4 + 3 * 8));
}

}  // namespace
}  // namespace moebius
