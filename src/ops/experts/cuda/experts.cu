// The choice of the kernel that runs an expert op, and what the kernel needs.
#include "ops/experts/cuda/experts.h"

#include "device/fallback_kernels.h"
#include "ops/experts/experts_backends.h"

namespace moebius::cuda {
namespace {

// The epilogues of the sm_90 kernels know SwiGLU without biases.
bool is_plain(const ExpertUp& a) { return a.b1_e2F.empty() && a.activation == GatedActivation{}; }
bool is_plain(const ExpertDown& a) { return a.b2_eC.empty(); }
bool is_plain(const DExpertDown& a) { return a.b2_eC.empty() && a.activation == GatedActivation{}; }
bool is_plain(const DExpertUp&) { return true; }
bool is_plain(const ExpertWgrad&) { return true; }

// weights tell the columns and the number of experts.
template <class Op>
bool by_sm90(const Stream& s, const char* name, const Op& a, const Tensor& rows, const Tensor& weights) {
  if (is_plain(a) && sm90::takes(a)) return true;
  if (rows.dtype == DType::bf16 && rows.numel() > 0) {
    note_fallback_kernel(s, name,
                         is_plain(a)
                             ? fmt::format("the Hopper kernels take columns in multiples of 8 and at most 512 experts; "
                                           "got weights {}",
                                           to_string(weights))
                             : "the Hopper kernels take SwiGLU without biases");
  }
  return false;
}

}  // namespace

void expert_up(Stream& s, const ExpertUp& a) {
  if (!a.x_TD.is_plain()) return sm90::expert_up_f8(s, a);
  by_sm90(s, "expert_up", a, a.x_TD.data, a.w1_e2FD.data) ? sm90::expert_up(s, a) : generic::expert_up(s, a);
}

void expert_down(Stream& s, const ExpertDown& a) {
  if (!a.a_RF.is_plain()) {
    return sm90::rows_product_f8(
        s, {.y_RN = a.y_RD, .a_RK = a.a_RF, .b_eNK = a.w2_eDF, .offsets_e1 = a.rows.offsets_e1}, "expert_down");
  }
  by_sm90(s, "expert_down", a, a.a_RF.data, a.w2_eDF.data) ? sm90::expert_down(s, a) : generic::expert_down(s, a);
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  if (!a.dout_TD.is_plain()) return sm90::d_expert_down_f8(s, a);
  by_sm90(s, "d_expert_down", a, a.dout_TD.data, a.w2_eDF.data) ? sm90::d_expert_down(s, a)
                                                                : generic::d_expert_down(s, a);
}

void d_expert_up(Stream& s, const DExpertUp& a) {
  if (!a.dh_R2F.is_plain()) {
    return sm90::rows_product_f8(
        s, {.y_RN = a.dx_RD, .a_RK = a.dh_R2F, .b_eNK = a.w1_e2FD, .offsets_e1 = a.rows.offsets_e1}, "d_expert_up");
  }
  by_sm90(s, "d_expert_up", a, a.dh_R2F.data, a.w1_e2FD.data) ? sm90::d_expert_up(s, a) : generic::d_expert_up(s, a);
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  if (!a.left_RM.is_plain()) {
    return sm90::wgrad_product_f8(s,
                                  {.dw_eMN = a.dw_eMN,
                                   .left_MR = a.left_RM,
                                   .right_NR = a.right_RN,
                                   .offsets_e1 = a.rows.offsets_e1,
                                   .accumulate = a.accumulate},
                                  "expert_wgrad");
  }
  by_sm90(s, "expert_wgrad", a, a.left_RM.data, a.dw_eMN) ? sm90::expert_wgrad(s, a) : generic::expert_wgrad(s, a);
}

int64_t scratch_bytes(const ExpertUp&) { return 0; }
int64_t scratch_bytes(const ExpertDown&) { return 0; }
int64_t scratch_bytes(const DExpertDown& a) { return num_dweight_partials(a) * a.dweight_R.numel() * 4; }
int64_t scratch_bytes(const DExpertUp&) { return 0; }
int64_t scratch_bytes(const ExpertWgrad&) { return 0; }

}  // namespace moebius::cuda
