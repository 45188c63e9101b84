// Ops of a pass of one token, as when one text is generated. The time of such a pass is mostly that between kernels, so
// each of these ops is fewer kernels than the ops that it replaces. They have the bits of those ops. Only Hopper GPUs
// have these kernels, for bf16 weights of common sizes.
#pragma once

#include "ops/attention/cached_attention.h"
#include "ops/experts/experts.h"
#include "ops/norm/norm.h"
#include "ops/rope/rope.h"
#include "ops/routing/routing.h"

namespace moebius {

// rms_norm_fwd(norm), then c = norm.y w^T + bias as gemm computes it with few_rows. Where no kernel does both, these
// ops run. REQUIRES: the weights were written before the previous kernel began.
struct NormGemm {
  Tensor c_TN;          // out
  RmsNormFwd norm;      // its y is written too
  Tensor w_ND, bias_N;  // in; the bias may be empty
};
void norm_gemm(Stream& s, const NormGemm& a);

// rope_fwd(rope), then cached_attention_fwd(attention), whose q, k and v are those of rope. Where one kernel does both,
// these three are not written; elsewhere the two ops run. REQUIRES: norms of rope are those of each head, and their
// weights were written before the previous kernel began.
struct RotatedAttention {
  CachedAttentionFwd attention;
  RopeFwd rope;
};
void rotated_attention(Stream& s, const RotatedAttention& a);

// rms_norm_fwd(norm), then router_logits_few(logits), whose x is norm.y. Where no kernel does both, these ops run.
// REQUIRES: the weights were written before the previous kernel began.
struct NormRouterLogits {
  RouterLogitsFwd logits;
  RmsNormFwd norm;
};
void norm_router_logits(Stream& s, const NormRouterLogits& a);

// The choice of the experts of one token, their products, and their weighted sum:
//   topk, weight = those of route_fwd
//   a[k,:]       = activation of expert_up for choice k, with few_rows     (rounded)
//   y            = combine of expert_down of a, with few_rows, whose rows are rounded too
//
// The experts are all on this GPU. a_KF is scratch. REQUIRES: w2 was written before this op was called.
struct TokenExperts {
  Tensor y_1D, topk_1K, weight_1K;  // out
  Tensor a_KF;                      // scratch
  Tensor logits_1E, bias_E;         // in; as in RouteFwd
  Tensor x_1D, w1_e2FD, w2_eDF;     // in
  Tensor b1_e2F, b2_eD;             // in; may be empty
  RouteRule rule;
  GatedActivation activation;
};
// Returns whether the device of s has kernels for this. The other ops compute the same elsewhere.
bool takes(const Stream& s, const TokenExperts& a);
void token_experts(Stream& s, const TokenExperts& a);  // REQUIRES: takes(s, a)
Cost cost(const TokenExperts& a);

}  // namespace moebius
