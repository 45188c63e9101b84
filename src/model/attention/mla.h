// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with the same calls as Gqa.
//   q = W_qb norm(W_qa x)  (W_q x without a query latent)
//   [c | k_rope] = W_kva x,  [k_nope | v] = W_kvb norm(c)
//   per head: q = [q_nope | rot(q_rope)],  k = [k_nope | rot(k_rope)] with one k_rope for all heads
// attention_bias adds a bias to W_qa, W_kva and the output; the projections of the heads have no bias. The eps of the
// norms is 1e-6, whatever rms_norm_eps is.
//
// Each tp rank has H / tp heads. Every rank computes the latents of its own rows t of the residual stream; these
// weights and norms are whole on every rank. The outputs of the projections of the heads, and k_rope, which is
// all-gathered, have the rows T of all tp ranks.
//
// With cp (model/attention/context_parallel.h) ranks exchange latents and k_rope instead of keys and values, and each
// rank computes the keys and values that it reads (model/attention/latent_kv.h). Then kv is not saved, and the gradient
// of W_kvb is computed together with those of the latents.
#pragma once

#include <optional>

#include "memory/wgrad_input.h"
#include "model/attention/attention.h"
#include "model/attention/context_parallel.h"
#include "model/attention/latent_kv.h"
#include "model/layers/bias.h"
#include "model/layers/linear.h"

namespace moebius {

struct RotateHeads;

class Mla {
 public:
  // A latent: before its norm, the norm's factor 1 / rms, and after the norm.
  struct Latent {
    Tensor c_tR, rstd_t, normed_tR;
  };
  struct SavedLatent {
    SavedTensor c_tR, rstd_t, normed_tR;
    Latent rows(int64_t t) const;  // the first t
  };
  // q is saved after RoPE; the backward assembles k and v from kv and k_rope, as forward does. x is the caller's.
  struct Saved {
    Tensor x_tD;
    SavedLatent q, kv;
    SavedTensor q_THd, kv_THw, k_rope_Tr, o_THv, lse_TH;
    WgradInput dy_tD, dy_TD, dq_THd, dkv_THw, dq_latent_tR, dkv_latent_tR, dk_rope_tr;
  };
  // Throws Error{usage} when tp does not divide the heads, and the errors of make_context_parallel.
  Mla(const LayerContext& c, const std::string& prefix);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // The methods of Attention.
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  void recompute(Step& step, const Attention::Input& x, Saved& saved) const;
  void output(Step& step, Tensor y_tD, const Saved& saved) const;
  bool holds_input(const Saved& saved) const { return recomputes_projections(saved) && !is_long_; }
  // Adds the gradients of the norms. It does not read x.
  Attention::InputGradient backward_input(Step& step, Tensor dy_tD, Saved& saved, bool with_dx,
                                          const Attention::Input& x) const;
  void backward_weight(Step& step, const Saved& saved) const;

  // The cache has the normalised latent and the rotated k_rope of each token: k_UGd is [U, 1, kv_lora_rank], v_UGd
  // [U, 1, qk_rope_head_dim]. Each call computes the keys and values of all earlier tokens from them.
  void forward_cached(Step& step, Tensor y_tD, const RmsNormFwd& norm, const KvCache& cache,
                      const CachedRows& rows) const;
  void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const;
  static std::vector<KeptTensor> kept(const Saved& saved);

 private:
  // The two outputs of W_kva, each computed by a product with its own rows of the matrix.
  enum class DownPart { latent, k_rope };
  // Returns the rows of a part, of W_kva or of its gradient.
  Tensor down_rows(const Tensor& kv_a, DownPart part) const;
  int64_t first_down_row(DownPart part) const { return part == DownPart::latent ? 0 : kv_rank_; }
  const ProductPrecision& down_precision(DownPart part) const {
    return part == DownPart::latent ? latent_precision_ : k_rope_precision_;
  }
  void down(Step& step, Tensor y, Tensor x_tD, DownPart part) const;  // y = x W^T
  // dx = dy W of the latent; dx += dy W of k_rope, which follows.
  void down_bwd_input(Step& step, Tensor dx_tD, Tensor dy, DownPart part) const;
  void down_bwd_weight(Step& step, Tensor dy, Tensor x_tD, DownPart part) const;  // dW += dy^T x
  void normalise(Step& step, const Param& norm, const Latent& latent) const;
  void normalise_bwd(Step& step, const Param& norm, Tensor dc_tR, Tensor dnormed_tR, const Latent& latent) const;
  RotateHeads rotation(Step& step, Tensor x_THw) const;
  void rotate(Step& step, Tensor x_THw) const;            // in place
  void rotate_gradient(Step& step, Tensor dx_THw) const;  // in place, by the transpose
  static bool recomputes_projections(const Saved& saved) {
    return saved.kv.c_tR.is_recomputed() || saved.q_THd.is_recomputed();
  }
  // Open the tensors that the next two write.
  void open_down(Step& step, Saved& saved) const;
  void open_up(Step& step, Saved& saved) const;
  // Compute the latents and k_rope, and then q and kv from the latents.
  void project_down(Step& step, Tensor x_tD, Saved& saved) const;
  void project_up(Step& step, Tensor x_tD, Saved& saved) const;
  void attend(Step& step, Saved& saved, int64_t tokens) const;  // o and lse, from q and kv
  // Computes the attention of the queries of a run over the latents of all tokens of its sequence.
  void attend_cached(Step& step, Tensor o_THv, Tensor q_THd, Tensor latent_UR, Tensor k_rope_Ur) const;
  void attend_bwd(Step& step, Saved& saved) const;  // dq, dkv and dk_rope, no longer rotated
  void make_q_latent(Step& step, Tensor x_tD,
                     const Latent& latent) const;  // before its norm; without one it does nothing
  void make_q(Step& step, Tensor q_THd, Tensor x_tD, const Latent& latent) const;  // normalises the latent
  void make_latent_kv(Step& step, Tensor k_rope_Tr, Tensor x_tD, const Latent& latent) const;
  Qkv alloc_qkv(Step& step, Tensor q_THd) const;  // q, and newly allocated k and v
  // Returns the latents and the rotated k_rope of the rows of all tp ranks, as cp ranks exchange them.
  Kv latents(Step& step, const Saved& saved, int64_t T) const;
  void attend_latents_bwd(Step& step, Tensor dkv_normed_tR, Saved& saved) const;  // attend_bwd if latents are exchanged
  void rotate_bwd(Step& step, Saved& saved, Tensor dk_rope_Tr) const;

  int64_t tp_, T_, H_, nope_, rope_, v_, q_rank_, kv_rank_;  // T: of a micro-batch on all tp ranks; H: of this rank
  float scale_;
  bool interleaved_, is_long_;  // is_long: model/layers/row_chunks.h
  DType dtype_;
  GpuKernels kernels_;
  std::optional<Linear> q_a_;
  const Param* q_a_norm_ = nullptr;
  ColumnLinear q_b_;  // maps the latent, or x if there is none, to q
  const Param &kv_a_, &kv_a_norm_;
  ProductPrecision latent_precision_, k_rope_precision_;  // of products with the parts of W_kva
  DenseRows kv_a_rows_;
  Adapter kv_a_adapter_;
  bool is_inference_;  // rows may be few
  std::unique_ptr<LatentKv> kv_;
  RowLinear o_;
  std::optional<Bias> q_a_bias_, kv_a_bias_, o_bias_;
  RowBlocks rows_;
  std::unique_ptr<ContextParallel> context_parallel_;
  const Tensor& rope_table_Pr_;
};

}  // namespace moebius
