// A dense layer is computed as an expert that has every row, with the experts' kernels for sm_90a and the portable
// ones. Their plain products sum over k in the order of the fused ones, so that two passes give the bits of one.
// cuBLASLt computes the shapes that they do not support.
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/activation/activation.h"
#include "ops/activation/activation_backends.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/sm90/few_rows.h"
#include "ops/gated_mlp/gated_mlp.h"
#include "ops/gated_mlp/gated_mlp_backends.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"

namespace moebius::cuda {
namespace {

Tensor as_experts(const Tensor& w) { return w.view({1, w.dim(0), w.dim(1)}); }
Operand as_experts(const Operand& w) {
  Operand q = w;
  q.data = as_experts(w.data);
  if (w.layout != ScaleLayout::per_tensor) q.scales = as_experts(w.scales);
  return q;
}

void activate(Stream& s, const GatedUp& a) { cuda::swiglu_fwd(s, {.a_TF = a.a_TF, .h_T2F = a.h_T2F}); }

void activate(Stream& s, const DGatedDown& a) {
  cuda::swiglu_bwd(s, {.dh_T2F = a.dh_T2F, .a_TF = a.a_TF, .da_TF = a.da_TF, .h_T2F = a.h_T2F});
}

void note_two_passes(const Stream& s, const char* op, const Tensor& w) {
  if (w.dtype != DType::bf16) return;
  note_fallback_kernel(s, op,
                       fmt::format("the fused kernels take fewer than 2^31 chunks of 8 elements; got {}, for cuBLASLt "
                                   "and a pass of its own",
                                   to_string(w)));
}

void note_portable(const Stream& s, const char* op, const Tensor& w) {
  if (!uses_hopper_kernels(s)) return;
  note_fallback_kernel(s, op,
                       fmt::format("portable kernels, since the Hopper kernels take weights with rows and columns in "
                                   "multiples of 8; got {}",
                                   to_string(w)));
}

void quantised_gated_up(Stream& s, const GatedUp& a) {
  const Operand w = as_experts(a.w_2FD);
  if (a.fused) return sm90::expert_up_f8(s, {.h_R2F = a.h_T2F, .a_RF = a.a_TF, .x_TD = a.x_TD, .w1_e2FD = w});
  sm90::rows_product_f8(s, {.y_RN = a.h_T2F, .a_RK = a.x_TD, .b_eNK = w}, "gated_up");
  activate(s, a);
}

void quantised_d_gated_down(Stream& s, const DGatedDown& a) {
  const Operand w = as_experts(a.w_DF);
  if (a.fused) {
    return sm90::d_expert_down_f8(
        s, {.dh_R2F = a.dh_T2F, .sa_RF = a.a_TF, .dout_TD = a.dy_TD, .w2_eDF = w, .h_R2F = a.h_T2F});
  }
  sm90::rows_product_f8(s, {.y_RN = a.da_TF, .a_RK = a.dy_TD, .b_eNK = w}, "d_gated_down");
  activate(s, a);
}

}  // namespace

void gated_up(Stream& s, const GatedUp& a) {
  if (!a.x_TD.is_plain()) return quantised_gated_up(s, a);
  const ExpertUp up{.h_R2F = a.h_T2F,
                    .a_RF = a.a_TF,
                    .x_TD = a.x_TD,
                    .w1_e2FD = as_experts(a.w_2FD.data),
                    .few_rows = a.few_rows && a.a_TF.dim(0) <= kFewRows};
  if (uses_hopper_kernels(s) && sm90::takes_few_rows(up)) return sm90::expert_up_few_rows(s, up);
  if (sm80::takes_few_rows(up)) return sm80::expert_up_few_rows(s, up);
  const ExpertDown product{.y_RD = a.h_T2F, .a_RF = a.x_TD, .w2_eDF = as_experts(a.w_2FD.data)};
  const auto run = [&](auto fused, auto alone) {
    if (a.fused) return fused(s, up);
    alone(s, product);
    activate(s, a);
  };
  if (uses_hopper_kernels(s) && sm90::takes(up) && sm90::takes(product)) return run(sm90::expert_up, sm90::expert_down);
  if (sm80::takes(up) && sm80::takes(product)) {
    note_portable(s, "gated_up", a.w_2FD.data);
    return run(sm80::expert_up, sm80::expert_down);
  }
  note_two_passes(s, "gated_up", a.w_2FD.data);
  cuda::gemm(s, {.c_MN = a.h_T2F, .a = a.x_TD, .b = a.w_2FD, .trans_b = true});
  activate(s, a);
}

void d_gated_down(Stream& s, const DGatedDown& a) {
  if (!a.dy_TD.is_plain()) return quantised_d_gated_down(s, a);
  const DExpertDown down{
      .dh_R2F = a.dh_T2F, .sa_RF = a.a_TF, .dout_TD = a.dy_TD, .w2_eDF = as_experts(a.w_DF.data), .h_R2F = a.h_T2F};
  const DExpertUp product{.dx_RD = a.da_TF, .dh_R2F = a.dy_TD, .w1_e2FD = as_experts(a.w_DF.data)};
  const auto run = [&](auto fused, auto alone) {
    if (a.fused) return fused(s, down);
    alone(s, product);
    activate(s, a);
  };
  if (uses_hopper_kernels(s) && sm90::takes(down) && sm90::takes(product))
    return run(sm90::d_expert_down, sm90::d_expert_up);
  if (sm80::takes(down) && sm80::takes(product)) {
    note_portable(s, "d_gated_down", a.w_DF.data);
    return run(sm80::d_expert_down, sm80::d_expert_up);
  }
  note_two_passes(s, "d_gated_down", a.w_DF.data);
  cuda::gemm(s, {.c_MN = a.da_TF, .a = a.dy_TD, .b = a.w_DF});
  activate(s, a);
}

}  // namespace moebius::cuda
