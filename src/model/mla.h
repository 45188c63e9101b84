// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), behind the same calls as Gqa.
//   q = W_qb norm(W_qa x)  (W_q x without a query latent),  [c | k_rope] = W_kva x,  [k_nope | v] = W_kvb norm(c)
//   per head: q = [q_nope | rot(q_rope)],  k = [k_nope | rot(k_rope)] with one k_rope for all heads
// The norms' eps is 1e-6 whatever rms_norm_eps is.
#pragma once

#include <optional>

#include "comm/mesh.h"
#include "model/gqa.h"

namespace moebius {

class Mla {
 public:
  // One of the latent vectors: before its norm, by how much it was normed, and after.
  struct Latent {
    Tensor c_TR, rstd_T, normed_TR;
  };
  struct SavedLatent {
    SavedTensor c_TR, rstd_T, normed_TR;
    Latent rows(int64_t T) const;  // the first T
  };
  // q is kept rotated; k and v are put together again from kv and k_rope in the backward. x and y are the caller's.
  // The gradients are left by backward_input for backward_weight, on the step stack.
  struct Saved {
    Tensor x_TD;
    SavedLatent q, kv;
    SavedTensor q_THd, kv_THw, k_rope_Tr, o_THv, lse_TH;
    Tensor dy_TD, dq_THd, dkv_THw, dq_latent_TR, dkv_latent_TR, dk_rope_Tr;
  };
  // Error{usage} on a mesh with tp or cp: its heads and sequences are not split.
  Mla(ParamTable& params, const std::string& prefix, const ModelSpec& spec, DType dtype, const Mesh& mesh,
      const Tensor& rope_table_Pr);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const;

  void forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  void remake(Step& step, Tensor x_TD, Saved& saved) const;                         // as Gqa
  void output(Step& step, Tensor y_TD, const Saved& saved) const;                   // the same
  void backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;  // adds the norms' gradients
  void backward_weight(Step& step, const Saved& saved) const;

  // Generation, as Gqa. What is cached of a token is its latent, normed, and its rotated k_rope: k_UGd is
  // [max tokens, 1, kv_lora_rank], v_UGd [max tokens, 1, qk_rope_head_dim]. Keys and values of all tokens so far are
  // made from them anew.
  void forward_cached(Step& step, Tensor y_TD, Tensor x_TD, KvCache& cache, int64_t first) const;
  static void declare_cache(MemoryPlan& plan, const std::string& prefix, const ModelSpec& spec, DType dtype,
                            int64_t max_tokens, KvCache& cache);

 private:
  Tensor down_rows(const Tensor& kv_a, bool rope) const;  // of W_kva or its gradient: the latent's rows or k_rope's
  void normalise(Step& step, const Param& norm, const Latent& latent) const;
  Tensor normalise_bwd(Step& step, const Param& norm, Tensor dnormed_TR, const Latent& latent) const;
  void rotate(Step& step, Tensor x_THw, bool transposed) const;
  void project(Step& step, Tensor x_TD, Saved& saved) const;      // everything before k and v are put together
  void attend(Step& step, Saved& saved, int64_t tokens) const;    // o and lse, from that
  void attend_bwd(Step& step, Tensor dy_TD, Saved& saved) const;  // dq, dkv and dk_rope, still rotated
  void make_q(Step& step, Tensor q_THd, Tensor x_TD, const Latent& latent) const;
  void make_latent_kv(Step& step, Tensor k_rope_Tr, Tensor x_TD, const Latent& latent) const;
  void put_kv_together(Step& step, Tensor k_THd, Tensor v_THv, Tensor kv_THw, Tensor k_rope_Tr) const;

  int64_t H_, nope_, rope_, v_, q_rank_, kv_rank_;
  float scale_;
  bool interleaved_;
  DType dtype_;
  std::optional<Linear> q_a_;
  const Param* q_a_norm_ = nullptr;
  Linear q_b_;  // of the latent, or of x
  const Param &kv_a_, &kv_a_norm_;
  Linear kv_b_, o_;
  const Tensor& rope_table_Pr_;
};

}  // namespace moebius
