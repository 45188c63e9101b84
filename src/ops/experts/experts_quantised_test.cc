// The products of experts with quantised operands are those of the values of these operands, which
// experts_test.cc compares with the definitions in double.
#include "ops/experts/experts_quantised_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::ExpertCase;
using testing::ExpertProblem;
using testing::Values;

using Format = testing::QuantisedFormat;
using Both = testing::QuantisedWithValues;

struct Case {
  Format format;
  ExpertCase c;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.format.name << " " << c.c.name; }

std::vector<Case> cases() {
  using enum ScaleLayout;
  std::vector<Case> all;
  for (const Format& format :
       {Format{"blocks", DType::f8_e4m3, row_blocks, square_blocks},
        Format{"tensors", DType::f8_e5m2, per_tensor, per_tensor}, Format{"mx", DType::f8_e4m3, mx_blocks, mx_blocks},
        Format{"nv", DType::f4_e2m1, nv_blocks, nv_blocks}}) {
    all.push_back({format, {.name = "no rows", .T = 3, .D = 4, .F = 6, .counts = {0, 0}}});
    all.push_back({format, {.name = "few", .T = 7, .D = 34, .F = 10, .counts = {1, 0, 5}, .spare = 3}});
    all.push_back({format, {.name = "many", .T = 90, .D = 150, .F = 70, .counts = {130, 600, 0, 3}, .gather = false}});
    all.push_back(
        {format, {.name = "gpt_oss", .T = 40, .D = 36, .F = 34, .counts = {20, 33}, .spare = 1, .gpt_oss = true}});
  }
  return all;
}

class QuantisedExpertsTest : public ::testing::TestWithParam<Case> {
 protected:
  // Runs `op` once with quantised operands and once with their values; both leave the same bits in `out`.
  template <class Op>
  void expect_same(void (*op)(Stream&, const Op&), Op a, std::vector<Array*> out,
                   const std::function<void(Op&)>& use_plain) {
    const std::vector<Array> before = copies(out);
    testing::run_expert_op<Op>(s_, op, a);
    const std::vector<Array> quantised = copies(out);
    for (size_t i = 0; i < out.size(); ++i)
      std::memcpy(out[i]->tensor().data, before[i].bytes().data(), before[i].bytes().size());
    use_plain(a);
    testing::run_expert_op<Op>(s_, op, a);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i]->bytes(), quantised[i].bytes()) << "output " << i;
  }
  static std::vector<Array> copies(const std::vector<Array*>& arrays) {
    std::vector<Array> all;
    for (const Array* a : arrays) all.push_back(*a);
    return all;
  }

  ThreadPool pool_{2};
  Stream s_{DeviceKind::cpu, pool_};
  ExpertProblem p_{GetParam().c};
  testing::QuantisedOperands q_{s_, p_, GetParam().format};
  int64_t D_ = GetParam().c.D, F_ = GetParam().c.F;
};
INSTANTIATE_TEST_SUITE_P(Formats, QuantisedExpertsTest, ::testing::ValuesIn(cases()));

TEST_P(QuantisedExpertsTest, ForwardIsThatOfTheValues) {
  Both x = q_.rows_of(p_.x), w1 = q_.weights_of(p_.w1), a = q_.rows_of(p_.a), w2 = q_.weights_of(p_.w2);
  Array h = Array::poisoned({p_.R, 2 * F_}, DType::f32), act = Array::poisoned({p_.R, F_}, DType::f32),
        y = Array::poisoned({p_.R, D_}, DType::f32);
  expect_same<ExpertUp>(expert_up,
                        {.h_R2F = h.tensor(),
                         .a_RF = act.tensor(),
                         .x_TD = x.q.operand(),
                         .w1_e2FD = w1.q.operand(),
                         .b1_e2F = p_.b1.tensor(),
                         .rows = p_.rows(),
                         .activation = p_.activation},
                        {&h, &act}, [&](ExpertUp& op) { op.x_TD = x.plain.tensor(), op.w1_e2FD = w1.plain.tensor(); });
  expect_same<ExpertDown>(expert_down,
                          {.y_RD = y.tensor(),
                           .a_RF = a.q.operand(),
                           .w2_eDF = w2.q.operand(),
                           .b2_eC = p_.b2.tensor(),
                           .b2_first = p_.b2_first,
                           .rows = p_.rows()},
                          {&y}, [&](ExpertDown& op) { op.a_RF = a.plain.tensor(), op.w2_eDF = w2.plain.tensor(); });
}

TEST_P(QuantisedExpertsTest, BackwardIsThatOfTheValues) {
  Both dout = q_.rows_of(p_.dout), w2 = q_.transposed_weights_of(p_.w2), dh = q_.rows_of(p_.h),
       w1 = q_.transposed_weights_of(p_.w1);
  Array dh_out = Array::poisoned({p_.R, 2 * F_}, DType::f32), sa = Array::poisoned({p_.R, F_}, DType::f32),
        dweight = Array::poisoned({p_.R}, DType::f32), dx = Array::poisoned({p_.R, D_}, DType::f32);
  // The products with b2 are summed in another order.
  const bool has_bias = p_.c.gpt_oss;
  std::vector<Array*> out{&dh_out, &sa};
  if (!has_bias) out.push_back(&dweight);
  expect_same<DExpertDown>(d_expert_down,
                           {.dh_R2F = dh_out.tensor(),
                            .sa_RF = sa.tensor(),
                            .dweight_R = dweight.tensor(),
                            .dout_TD = dout.q.operand(),
                            .w2_eDF = w2.q.operand(),
                            .b2_eC = p_.b2.tensor(),
                            .h_R2F = p_.h.tensor(),
                            .weight_R = p_.weight.tensor(),
                            .b2_first = p_.b2_first,
                            .rows = p_.rows(),
                            .activation = p_.activation},
                           out,
                           [&](DExpertDown& op) { op.dout_TD = dout.plain.tensor(), op.w2_eDF = w2.plain.tensor(); });
  expect_same<DExpertUp>(d_expert_up,
                         {.dx_RD = dx.tensor(), .dh_R2F = dh.q.operand(), .w1_e2FD = w1.q.operand(), .rows = p_.rows()},
                         {&dx}, [&](DExpertUp& op) { op.dh_R2F = dh.plain.tensor(), op.w1_e2FD = w1.plain.tensor(); });
}

// With a bias, against the definition: sums of D and D / 2 products in f32.
TEST_P(QuantisedExpertsTest, GradientOfTheWeightsOfRowsEqualsTheReference) {
  Both dout = q_.rows_of(p_.dout), w2 = q_.transposed_weights_of(p_.w2);
  Array dh = Array::poisoned({p_.R, 2 * F_}, DType::f32), sa = Array::poisoned({p_.R, F_}, DType::f32),
        dweight = Array::of({p_.R}, DType::f32, Values(p_.R, 0.0));
  testing::run_expert_op<DExpertDown>(s_, d_expert_down,
                                      {.dh_R2F = dh.tensor(),
                                       .sa_RF = sa.tensor(),
                                       .dweight_R = dweight.tensor(),
                                       .dout_TD = dout.q.operand(),
                                       .w2_eDF = w2.q.operand(),
                                       .b2_eC = p_.b2.tensor(),
                                       .h_R2F = p_.h.tensor(),
                                       .weight_R = p_.weight.tensor(),
                                       .b2_first = p_.b2_first,
                                       .rows = p_.rows(),
                                       .activation = p_.activation});
  const Values want = ref::d_expert_down(p_.shape, dout.plain.values(), w2.plain.values(), p_.h.values(),
                                         p_.weight.values(), p_.R, p_.ref_activation, p_.ref_b2())
                          .dweight;
  const double sum = 0x1p-21 * std::sqrt(static_cast<double>(D_ + F_));
  testing::expect_close("dweight", dweight.values(), want, sum, 1e-6);
}

TEST_P(QuantisedExpertsTest, WeightGradientIsThatOfTheValues) {
  const bool gathers = p_.c.gather;
  Both dh = q_.left_of(p_.h, false), x = q_.right_of(p_.x, gathers), dout = q_.left_of(p_.dout, gathers),
       a = q_.right_of(p_.a, false);
  Array dw1 = Array::normal({p_.E(), 2 * F_, D_}, DType::f32, 8), dw2 = Array::normal({p_.E(), D_, F_}, DType::f32, 9);
  const Rows plain{p_.offsets.tensor(), {}};
  for (const bool accumulate : {false, true}) {
    expect_same<ExpertWgrad>(expert_wgrad,
                             {.dw_eMN = dw1.tensor(),
                              .left_RM = dh.q.operand(),
                              .right_RN = x.q.operand(),
                              .accumulate = accumulate,
                              .rows = plain},
                             {&dw1},
                             [&](ExpertWgrad& op) { op.left_RM = dh.plain.tensor(), op.right_RN = x.plain.tensor(); });
    expect_same<ExpertWgrad>(
        expert_wgrad,
        {.dw_eMN = dw2.tensor(),
         .left_RM = dout.q.operand(),
         .right_RN = a.q.operand(),
         .accumulate = accumulate,
         .rows = plain},
        {&dw2}, [&](ExpertWgrad& op) { op.left_RM = dout.plain.tensor(), op.right_RN = a.plain.tensor(); });
  }
}

}  // namespace
}  // namespace moebius
