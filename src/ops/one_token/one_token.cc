#include "ops/one_token/one_token.h"

#include "ops/gemm/gemm.h"
#include "ops/one_token/one_token_backends.h"
#include "ops/routing/router_logits_few.h"

namespace moebius {
namespace {

void check(const char* who, const RmsNormFwd& a) {
  MOEBIUS_CHECK(usage, a.x_TD.shape.rank() == 2, "{}: x must be [T, D]; got {}", who, to_string(a.x_TD));
  const DType dtype = a.x_TD.dtype;
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1);
  check_tensor(who, "x", a.x_TD, dtype, {T, D});
  check_tensor(who, "y", a.y_TD, dtype, {T, D});
  check_tensor(who, "rstd", a.rstd_T, DType::f32, {T});
  check_tensor(who, "norm.w", a.w_D, dtype, {D});
  if (a.residual_TD.empty()) return;
  check_tensor(who, "residual", a.residual_TD, dtype, {T, D});
  check_tensor(who, "sum", a.sum_TD, dtype, {T, D});
}

void check(const NormGemm& a) {
  constexpr const char* who = "norm_gemm";
  check(who, a.norm);
  const Tensor& x = a.norm.y_TD;
  MOEBIUS_CHECK(usage, a.w_ND.shape.rank() == 2 && x.shape.rank() == 2, "{}: w and norm.y must be matrices; got {}, {}",
                who, to_string(a.w_ND), to_string(x));
  const int64_t N = a.w_ND.dim(0);
  check_tensor(who, "w", a.w_ND, x.dtype, {N, x.dim(1)});
  check_tensor(who, "c", a.c_TN, a.c_TN.dtype, {x.dim(0), N});
  if (!a.bias_N.empty()) check_tensor(who, "bias", a.bias_N, a.bias_N.dtype, {N});
}

void check(const NormRouterLogits& a) {
  constexpr const char* who = "norm_router_logits";
  check(who, a.norm);
  MOEBIUS_CHECK(usage, a.logits.w_ED.shape.rank() == 2, "{}: w must be [E, D]; got {}", who, to_string(a.logits.w_ED));
  const int64_t T = a.norm.x_TD.dim(0), D = a.norm.x_TD.dim(1), E = a.logits.w_ED.dim(0);
  const DType w = a.logits.w_ED.dtype == DType::f32 ? DType::f32 : a.norm.x_TD.dtype;
  check_tensor(who, "w", a.logits.w_ED, w, {E, D});
  check_tensor(who, "logits", a.logits.logits_TE, DType::f32, {T, E});
  if (!a.logits.bias_E.empty()) check_tensor(who, "bias", a.logits.bias_E, DType::f32, {E});
  MOEBIUS_CHECK(usage, a.logits.x_TD.data == a.norm.y_TD.data && a.logits.x_TD.shape == a.norm.y_TD.shape,
                "norm_router_logits: x of the logits must be y of the norm; got {}, {}", to_string(a.logits.x_TD),
                to_string(a.norm.y_TD));
}

void check(const RotatedAttention& a) {
  const CachedAttentionFwd& x = a.attention;
  MOEBIUS_CHECK(usage,
                x.q_NHd.data == a.rope.q_THd.data && x.k_NGd.data == a.rope.k_TGd.data &&
                    x.v_NGd.data == a.rope.v_TGd.data && x.pos_N.data == a.rope.pos_T.data,
                "rotated_attention: q, k, v and positions of the attention must be those of rope; got {}, {}",
                to_string(x.q_NHd), to_string(a.rope.q_THd));
  constexpr const char* who = "rotated_attention";
  MOEBIUS_CHECK(usage, x.q_NHd.shape.rank() == 3 && x.k_UGd.shape.rank() == 3,
                "{}: q and the cached k must be [rows, heads, d]; got {} and {}", who, to_string(x.q_NHd),
                to_string(x.k_UGd));
  const DType dtype = x.q_NHd.dtype;
  const int64_t N = x.q_NHd.dim(0), H = x.q_NHd.dim(1), d = x.q_NHd.dim(2), U = x.k_UGd.dim(0), G = x.k_UGd.dim(1);
  MOEBIUS_CHECK(usage, G > 0 && H % G == 0 && x.max_tokens > 0 && U % x.max_tokens == 0,
                "{}: the heads of k must divide those of q, and max_tokens {} the cache; got q {} and k {}", who,
                x.max_tokens, to_string(x.q_NHd), to_string(x.k_UGd));
  check_tensor(who, "o", x.o_NHd, dtype, {N, H, d});
  check_tensor(who, "lse", x.lse_NH, DType::f32, {N, H});
  check_tensor(who, "cached k", x.k_UGd, dtype, {U, G, d});
  check_tensor(who, "cached v", x.v_UGd, dtype, {U, G, d});
  check_tensor(who, "pos", x.pos_N, DType::i32, {N});
  check_tensor(who, "sequence", x.sequence_N, DType::i32, {N});
  check_tensor(who, "qkv", a.rope.qkv_TC, dtype, {N, (H + 2 * G) * d});
  check_tensor(who, "the table", a.rope.cos_sin_Pd, DType::f32, {a.rope.cos_sin_Pd.dim(0), d});
  if (!a.rope.q_norm_A.empty()) check_tensor(who, "q_norm", a.rope.q_norm_A, dtype, {d});
  if (!a.rope.k_norm_B.empty()) check_tensor(who, "k_norm", a.rope.k_norm_B, dtype, {d});
}

void check(const TokenExperts& a) {
  constexpr const char* who = "token_experts";
  MOEBIUS_CHECK(usage, a.w2_eDF.shape.rank() == 3 && a.topk_1K.shape.rank() == 2,
                "{}: w2 must be [e, D, F] and topk [1, K]; got {}, {}", who, to_string(a.w2_eDF), to_string(a.topk_1K));
  const int64_t E = a.w2_eDF.dim(0), D = a.w2_eDF.dim(1), F = a.w2_eDF.dim(2), K = a.topk_1K.dim(1);
  const DType dtype = a.x_1D.dtype;
  check_tensor(who, "y", a.y_1D, dtype, {1, D});
  check_tensor(who, "x", a.x_1D, dtype, {1, D});
  check_tensor(who, "a", a.a_KF, dtype, {K, F});
  check_tensor(who, "topk", a.topk_1K, DType::i32, {1, K});
  check_tensor(who, "weight", a.weight_1K, DType::f32, {1, K});
  check_tensor(who, "logits", a.logits_1E, DType::f32, {1, E});
  check_tensor(who, "w1", a.w1_e2FD, dtype, {E, 2 * F, D});
  check_tensor(who, "w2", a.w2_eDF, dtype, {E, D, F});
  if (!a.bias_E.empty()) check_tensor(who, "bias", a.bias_E, DType::f32, {E});
  if (!a.b1_e2F.empty()) check_tensor(who, "b1", a.b1_e2F, dtype, {E, 2 * F});
  if (!a.b2_eD.empty()) check_tensor(who, "b2", a.b2_eD, dtype, {E, D});
}

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

}  // namespace

void norm_gemm(Stream& s, const NormGemm& a) {
  check(a);
  if (s.device() == DeviceKind::cuda && cuda::takes(s, a)) {
    const auto flops = 2.0 * static_cast<double>(a.c_TN.numel() * a.w_ND.dim(1));
    OpScope scope(s, "norm_gemm", {flops, bytes_of(a.w_ND) + bytes_of(a.c_TN) + 4 * bytes_of(a.norm.x_TD)});
    return cuda::norm_gemm(s, a);
  }
  rms_norm_fwd(s, a.norm);
  gemm(s, {.c_MN = a.c_TN, .a = a.norm.y_TD, .b = a.w_ND, .bias_N = a.bias_N, .trans_b = true, .few_rows = true});
}

void norm_router_logits(Stream& s, const NormRouterLogits& a) {
  check(a);
  if (s.device() == DeviceKind::cuda && cuda::takes(s, a)) {
    const auto flops = 2.0 * static_cast<double>(a.logits.logits_TE.numel() * a.norm.x_TD.dim(1));
    OpScope scope(s, "norm_router_logits", {flops, bytes_of(a.logits.w_ED) + 4 * bytes_of(a.norm.x_TD)});
    return cuda::norm_router_logits(s, a);
  }
  rms_norm_fwd(s, a.norm);
  router_logits_few(s, a.logits);
}

void rotated_attention(Stream& s, const RotatedAttention& a) {
  check(a);
  if (s.device() == DeviceKind::cuda && cuda::takes(s, a)) {
    OpScope scope(s, "rotated_attention", cost(a.attention));
    return cuda::rotated_attention(s, a);
  }
  rope_fwd(s, a.rope);
  cached_attention_fwd(s, a.attention);
}

bool takes(const Stream& s, const TokenExperts& a) { return s.device() == DeviceKind::cuda && cuda::takes(s, a); }

void token_experts(Stream& s, const TokenExperts& a) {
  check(a);
  OpScope scope(s, "token_experts", cost(a));
  MOEBIUS_CHECK(usage, takes(s, a),
                "token_experts: this GPU has no kernels for {} experts of {} x {}; run the other ops", a.w2_eDF.dim(0),
                a.w2_eDF.dim(1), a.w2_eDF.dim(2));
  cuda::token_experts(s, a);
}

Cost cost(const TokenExperts& a) {
  const double per_expert = 3.0 * static_cast<double>(a.w2_eDF.dim(1) * a.w2_eDF.dim(2)),
               k = static_cast<double>(a.topk_1K.dim(1));
  return {2 * k * per_expert, 2 * k * per_expert + bytes_of(a.x_1D) + bytes_of(a.y_1D) + 2 * bytes_of(a.a_KF)};
}

}  // namespace moebius
