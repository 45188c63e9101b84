// The arguments that the expert ops refuse, with their messages word for word, and the costs
// of the ops.
#include <gmock/gmock.h>

#include "ops/experts/experts_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::run_expert_op;
using Problem = testing::ExpertProblem;

// A small problem, and tensors of the shapes of results.
class ExpertArguments : public ::testing::Test {
 protected:
  ExpertUp up_arguments() {
    return {.h_R2F = h.tensor(), .a_RF = a.tensor(), .x_TD = p.x.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()};
  }

  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  Problem p{{"errors", 3, 5, 4, {1, 2}}};
  Array h{{3, 8}, DType::f32}, a{{3, 4}, DType::f32}, y{{3, 5}, DType::f32}, dweight{{3}, DType::f32};
};

TEST_F(ExpertArguments, OfUpAreNamed) {
  Array i({3, 5}, DType::i32);
  const ExpertUp up = up_arguments();
  const auto error = [&](Stream& on, const ExpertUp& args) {
    return testing::error_of([&] { run_expert_op<ExpertUp>(on, expert_up, args); });
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
  bad = up;
  bad.b1_e2F = a.tensor();
  EXPECT_EQ(error(s, bad), "expert_up: b1 must be f32[2, 8]; got f32[3, 4]");
  EXPECT_THAT(testing::error_of([&] { expert_up(s, up); }), ::testing::StartsWith("expert_up: scratch must have "));
}

TEST_F(ExpertArguments, OfDownAndOfBackwardAreNamed) {
  EXPECT_EQ(testing::error_of([&] {
              run_expert_op<ExpertDown>(
                  s, expert_down, {.y_RD = h.tensor(), .a_RF = a.tensor(), .w2_eDF = p.w2.tensor(), .rows = p.rows()});
            }),
            "expert_down: w2 must be f32[2, 8, 4]; got f32[2, 5, 4]");
  EXPECT_EQ(testing::error_of([&] {
              run_expert_op<DExpertUp>(
                  s, d_expert_up,
                  {.dx_RD = a.tensor(), .dh_R2F = h.tensor(), .w1_e2FD = p.w1.tensor(), .rows = p.rows()});
            }),
            "d_expert_up: w1 must be f32[2, 8, 4]; got f32[2, 8, 5]");
  EXPECT_EQ(testing::error_of([&] {
              run_expert_op<DExpertDown>(s, d_expert_down,
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
  EXPECT_EQ(testing::error_of([&] {
              run_expert_op<ExpertDown>(s, expert_down,
                                        {.y_RD = y.tensor(),
                                         .a_RF = a.tensor(),
                                         .w2_eDF = p.w2.tensor(),
                                         .b2_eC = y.tensor(),
                                         .b2_first = 1,
                                         .rows = p.rows()});
            }),
            "expert_down: b2 must have a row for each expert, of columns from 1 on of 5; got f32[3, 5]");
}

TEST_F(ExpertArguments, OfWeightGradientsAreNamed) {
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
              run_expert_op<ExpertWgrad>(s, expert_wgrad,
                                         {.dw_eMN = dw.tensor(),
                                          .left_RM = h.tensor(),
                                          .right_RN = y.tensor(),
                                          .gather_right = true,
                                          .rows = {p.offsets.tensor(), {}}});
            }),
            "expert_wgrad: a side is gathered, but rows have no token index; got f32[0]");
}

// Each product refuses scales of one operand alone.
TEST(Experts, OneQuantisedOperandIsRefused) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({3, 4}, DType::f32), scales({3, 1}, DType::f32), out({3, 4}, DType::f32);
  const Operand plain = x.tensor(), scaled(x.tensor(), scales.tensor(), ScaleLayout::row_blocks);
  const auto message = [](const char* who, const char* a, const char* b) {
    return fmt::format(
        "{}: {} and {} must both be quantised, or both plain; got f32[3, 4] with row_blocks scales f32[3, 1] and "
        "f32[3, 4]",
        who, a, b);
  };
  const auto error = [](auto&& body) { return testing::error_of(body); };
  const Tensor o = out.tensor();
  EXPECT_EQ(error([&] { expert_up(s, {.a_RF = o, .x_TD = scaled, .w1_e2FD = plain}); }),
            message("expert_up", "x", "w1"));
  EXPECT_EQ(error([&] { expert_down(s, {.y_RD = o, .a_RF = scaled, .w2_eDF = plain}); }),
            message("expert_down", "a", "w2"));
  EXPECT_EQ(error([&] { d_expert_down(s, {.sa_RF = o, .dout_TD = scaled, .w2_eDF = plain}); }),
            message("d_expert_down", "dout", "w2"));
  EXPECT_EQ(error([&] { d_expert_up(s, {.dx_RD = o, .dh_R2F = scaled, .w1_e2FD = plain}); }),
            message("d_expert_up", "dh", "w1"));
  EXPECT_EQ(error([&] { expert_wgrad(s, {.left_RM = scaled, .right_RN = plain}); }),
            message("expert_wgrad", "left", "right"));
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

// Two parts of the rows cost as much as all rows, plus a second read of the weights.
TEST(Experts, EachPartOfTheRowsReadsTheWeights) {
  const auto null = [](Shape shape, DType dtype = DType::bf16) { return testing::null_tensor(shape, dtype); };
  const Rows gathered{null({3}, DType::i32), null({8}, DType::i32)}, in_place{null({3}, DType::i32), {}};
  const Tensor w1 = null({2, 8, 6}), w2 = null({2, 6, 4});
  const auto expect_parts = [&](auto op, const Tensor& weights) {
    const Cost all = cost(op);
    op.part = {.share = 0.25, .source_share = 0.75};
    Cost sum = cost(op);
    op.part = {.share = 0.75, .source_share = 0.25};
    sum += cost(op);
    EXPECT_EQ(sum.flops, all.flops);
    EXPECT_EQ(sum.bytes, all.bytes + static_cast<double>(weights.num_bytes()));
  };
  ExpertUp up{.h_R2F = null({8, 8}), .a_RF = null({8, 4}), .x_TD = null({16, 6}), .w1_e2FD = w1, .rows = gathered};
  expect_parts(up, w1);
  expect_parts(ExpertDown{.y_RD = null({8, 6}), .a_RF = null({8, 4}), .w2_eDF = w2, .rows = in_place}, w2);
  expect_parts(DExpertDown{.dh_R2F = null({8, 8}),
                           .sa_RF = null({8, 4}),
                           .dweight_R = null({8}, DType::f32),
                           .dout_TD = null({16, 6}),
                           .w2_eDF = w2,
                           .h_R2F = null({8, 8}),
                           .weight_R = null({8}, DType::f32),
                           .rows = gathered},
               w2);
  expect_parts(DExpertUp{.dx_RD = null({8, 6}), .dh_R2F = null({8, 8}), .w1_e2FD = w1, .rows = in_place}, w1);
  // A part that reads a tensor of its own, as own rows read x in place.
  const Cost all = cost(up);
  up.part = {.share = 0.25, .source_share = 1};
  up.x_TD = null({4, 6});
  Cost sum = cost(up);
  up.part = {.share = 0.75, .source_share = 0.75};
  up.x_TD = null({16, 6});
  sum += cost(up);
  EXPECT_EQ(sum.bytes, all.bytes + static_cast<double>(w1.num_bytes()));
}

}  // namespace
}  // namespace moebius
