// On the CPU the time of the activation is small compared with the product, so it is a separate pass
// in both directions.
#include "ops/gated_mlp/gated_mlp.h"
#include "ops/activation/activation.h"
#include "ops/activation/activation_backends.h"
#include "ops/gated_mlp/gated_mlp_backends.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"

namespace moebius::cpu {

void gated_up(Stream& s, const GatedUp& a) {
  cpu::gemm(s, {.c_MN = a.h_T2F, .a = a.x_TD, .b = a.w_2FD, .trans_b = true, .few_rows = a.few_rows});
  cpu::swiglu_fwd(s, {.a_TF = a.a_TF, .h_T2F = a.h_T2F});
}

void d_gated_down(Stream& s, const DGatedDown& a) {
  cpu::gemm(s, {.c_MN = a.da_TF, .a = a.dy_TD, .b = a.w_DF});
  cpu::swiglu_bwd(s, {.dh_T2F = a.dh_T2F, .a_TF = a.a_TF, .da_TF = a.da_TF, .h_T2F = a.h_T2F});
}

}  // namespace moebius::cpu
