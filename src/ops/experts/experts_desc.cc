#include "ops/experts/experts_desc.h"

namespace moebius {
namespace {

GatheredOperand gathered_by(const Rows& rows) {
  return rows.token_R.empty() ? GatheredOperand::none : GatheredOperand::a;
}

}  // namespace

GroupedGemmDesc describe(const ExpertUp& a) {
  return {.num_experts = a.w1_e2FD.data.dim(0),
          .m = a.h_R2F.dim(0),
          .n = a.h_R2F.dim(1),
          .k = a.x_TD.data.dim(1),
          .a = OperandDesc(a.x_TD),
          .b = OperandDesc(a.w1_e2FD),
          .trans_b = true,
          .gathered = gathered_by(a.rows),
          .epilogue = GroupedEpilogue::gated_activation};
}

GroupedGemmDesc describe(const ExpertDown& a) {
  return {.num_experts = a.w2_eDF.data.dim(0),
          .m = a.y_RD.dim(0),
          .n = a.y_RD.dim(1),
          .k = a.a_RF.data.dim(1),
          .a = OperandDesc(a.a_RF),
          .b = OperandDesc(a.w2_eDF),
          .trans_b = true};
}

GroupedGemmDesc describe(const DExpertDown& a) {
  return {.num_experts = a.w2_eDF.data.dim(0),
          .m = a.sa_RF.dim(0),
          .n = a.sa_RF.dim(1),
          .k = a.dout_TD.data.dim(1),
          .a = OperandDesc(a.dout_TD),
          .b = OperandDesc(a.w2_eDF),
          .gathered = gathered_by(a.rows),
          .epilogue = GroupedEpilogue::gated_activation_bwd};
}

GroupedGemmDesc describe(const DExpertUp& a) {
  return {.num_experts = a.w1_e2FD.data.dim(0),
          .m = a.dx_RD.dim(0),
          .n = a.dx_RD.dim(1),
          .k = a.dh_R2F.data.dim(1),
          .a = OperandDesc(a.dh_R2F),
          .b = OperandDesc(a.w1_e2FD)};
}

GroupedGemmDesc describe(const ExpertWgrad& a) {
  const bool gathers = !a.rows.token_R.empty();
  return {.num_experts = a.dw_eMN.dim(0),
          .m = a.dw_eMN.dim(1),
          .n = a.dw_eMN.dim(2),
          .k = a.gather_left ? a.right_RN.data.dim(0) : a.left_RM.data.dim(0),
          .a = OperandDesc(a.left_RM),
          .b = OperandDesc(a.right_RN),
          .trans_a = true,
          .gathered = gathers && a.gather_left    ? GatheredOperand::a
                      : gathers && a.gather_right ? GatheredOperand::b
                                                  : GatheredOperand::none,
          .epilogue = GroupedEpilogue::add_f32};
}

}  // namespace moebius
