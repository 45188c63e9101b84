// The gradients that the backward ops give together, against finite differences of the reference.
#include "ops/experts/experts_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::run_expert_op;
using testing::Values;
using Problem = testing::ExpertProblem;

// The gradients of the sum of probe . y, with y[t,:] = sum over the rows of t of weight (w2 a). They are computed by
// chaining the ops, in f32.
struct ChainedGradients {
  Array dh, sa, dweight, dw1, dw2;
  Values dx;
};
ChainedGradients chained_gradients(Stream& s, Problem& p) {
  const DType f32 = DType::f32;
  Array h({p.R, 2 * p.c.F}, f32), a({p.R, p.c.F}, f32), dxrow({p.R, p.c.D}, f32);
  ChainedGradients g{.dh = Array({p.R, 2 * p.c.F}, f32),
                     .sa = Array({p.R, p.c.F}, f32),
                     .dweight = Array({p.R}, f32),
                     .dw1 = Array({4, 8, 6}, f32),
                     .dw2 = Array({4, 6, 4}, f32),
                     .dx = Values(p.c.T * p.c.D)};
  run_expert_op<ExpertUp>(s, expert_up,
                          {.h_R2F = h.tensor(),
                           .a_RF = a.tensor(),
                           .x_TD = p.x.tensor(),
                           .w1_e2FD = p.w1.tensor(),
                           .b1_e2F = p.b1.tensor(),
                           .rows = p.rows(),
                           .activation = p.activation});
  run_expert_op<DExpertDown>(s, d_expert_down,
                             {.dh_R2F = g.dh.tensor(),
                              .sa_RF = g.sa.tensor(),
                              .dweight_R = g.dweight.tensor(),
                              .dout_TD = p.dout.tensor(),
                              .w2_eDF = p.w2.tensor(),
                              .b2_eC = p.b2.tensor(),
                              .h_R2F = h.tensor(),
                              .weight_R = p.weight.tensor(),
                              .b2_first = p.b2_first,
                              .rows = p.rows(),
                              .activation = p.activation});
  run_expert_op<DExpertUp>(
      s, d_expert_up, {.dx_RD = dxrow.tensor(), .dh_R2F = g.dh.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()});
  run_expert_op<ExpertWgrad>(s, expert_wgrad,
                             {.dw_eMN = g.dw1.tensor(),
                              .left_RM = g.dh.tensor(),
                              .right_RN = p.x.tensor(),
                              .gather_right = true,
                              .rows = p.rows()});
  run_expert_op<ExpertWgrad>(s, expert_wgrad,
                             {.dw_eMN = g.dw2.tensor(),
                              .left_RM = p.dout.tensor(),
                              .right_RN = g.sa.tensor(),
                              .gather_left = true,
                              .rows = p.rows()});
  const Values rows = dxrow.values();
  for (int64_t i = 0; i < p.R * p.c.D; ++i) g.dx[p.shape.source(i / p.c.D) * p.c.D + i % p.c.D] += rows[i];
  return g;
}

// loss(x): a function whose derivatives at `at` are compared with `gradient`, by central differences.
template <class Loss>
void expect_derivatives(const char* what, Values at, const Values& gradient, const Loss& loss) {
  Values differences(at.size());
  for (size_t i = 0; i < at.size(); ++i) {
    const double step = 1e-5, old = at[i];
    at[i] = old + step;
    const double above = loss(at);
    at[i] = old - step;
    differences[i] = (above - loss(at)) / (2 * step);
    at[i] = old;
  }
  testing::expect_close(what, gradient, differences, 1e-5, 1e-6);
}

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
  ChainedGradients g = chained_gradients(s, p);
  const Values x = p.x.values(), w1 = p.w1.values(), w2 = p.w2.values(), weight = p.weight.values();
  expect_derivatives("dx", x, g.dx, [&](const Values& v) { return loss(v, w1, w2, weight); });
  expect_derivatives("dw1", w1, g.dw1.values(), [&](const Values& v) { return loss(x, v, w2, weight); });
  expect_derivatives("dw2", w2, g.dw2.values(), [&](const Values& v) { return loss(x, w1, v, weight); });
  expect_derivatives("dweight", weight, g.dweight.values(), [&](const Values& v) { return loss(x, w1, w2, v); });
  if (!gpt_oss) return;
  Array db1 = Array::of({4, 8}, DType::f32, Values(32)), db2 = Array::of({4, 3}, DType::f32, Values(12));
  expert_bias_grad(s, {.db_eN = db1.tensor(), .x_RM = g.dh.tensor(), .rows = p.rows()});
  expert_bias_grad(s, {.db_eN = db2.tensor(),
                       .x_RM = p.dout.tensor(),
                       .weight_R = p.weight.tensor(),
                       .x_first = p.b2_first,
                       .gather = true,
                       .rows = p.rows()});
  expect_derivatives("db1", p.b1.values(), db1.values(), [&](const Values& v) {
    b1 = v;
    return loss(x, w1, w2, weight);
  });
  b1 = p.b1.values();
  expect_derivatives("db2", p.b2.values(), db2.values(), [&](const Values& v) {
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

}  // namespace
}  // namespace moebius
