// Causal grouped-query attention with RoPE. Depending on the model family it has biases of q, k, v and o, attention
// sinks, a sliding window, RMSNorm of q and k (per head or over all heads), and clipping of q, k and v.
//
// Each tp rank has H / tp query heads and G / tp kv heads (model/layers/linear.h). x and y [t, D] are a rank's rows of
// the residual stream. The tensors between them have the rows T of all tp ranks, and the rank's own heads.
#pragma once

#include <optional>

#include "memory/wgrad_input.h"
#include "model/attention/attention.h"
#include "model/attention/context_parallel.h"
#include "model/layers/bias.h"
#include "model/layers/linear.h"
#include "model/lora/adapter_rows.h"
#include "ops/rope/rope.h"

namespace moebius {

class Gqa {
 public:
  // q, k and v are saved as qkv, the output of the projection; the backward recomputes them from it. x is the
  // tensor of the caller.
  struct Saved {
    Tensor x_tD;
    SavedTensor qkv_TC, o_THd, lse_TH;
    WgradInput dy_tD, dy_TD, dqkv_TC;  // dy of this rank's rows is only for the bias of o
    AdapterRows qkv_rows, o_rows;
    bool weights_follow = true;  // backward_weight runs right after backward_input
  };
  // window: the sliding window of this layer in tokens, 0: none. Throws Error{usage} when tp does not divide the heads,
  // and the errors of make_context_parallel().
  Gqa(const LayerContext& c, const std::string& prefix, int64_t window);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // The methods of Attention.
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  void recompute(Step& step, const Attention::Input& x, Saved& saved) const;
  void output(Step& step, Tensor y_tD, const Saved& saved) const;  // y = o W_o^T
  bool holds_input(const Saved& saved) const { return saved.qkv_TC.is_recomputed() && !is_long_; }
  // Adds the gradients of the q and k norms.
  Attention::InputGradient backward_input(Step& step, Tensor dy_tD, Saved& saved, bool with_dx,
                                          const Attention::Input& x) const;
  void backward_weight(Step& step, const Saved& saved) const;

  void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const;
  void forward_cached(Step& step, Tensor y_tD, const RmsNormFwd& norm, const KvCache& cache,
                      const CachedRows& rows) const;
  static std::vector<KeptTensor> kept(const Saved& saved);

 private:
  int64_t heads_of(int64_t kv_heads) const { return H_ / G_ * kv_heads; }
  // Returns q, k and v of so many kv heads, with the sinks of all heads.
  Qkv alloc_qkv(Step& step, int64_t tokens, int64_t kv_heads) const;
  Qkv alloc_qkv(Step& step, int64_t tokens) const { return alloc_qkv(step, tokens, G_); }
  // Returns q, k and v in the memory of a tensor like the projection's output, or on the stack if the parts of that
  // tensor would not be aligned.
  Qkv qkv_in(Step& step, Tensor buffer_TC) const;
  void project(Step& step, Tensor qkv_TC, Tensor x_tD, Tensor low_TL = {}) const;  // low_TL: of the adapter
  void project_normed(Step& step, Tensor qkv_TC, const RmsNormFwd& norm) const;    // of x = norm.y, which it computes
  void attend(Step& step, Saved& saved, int64_t tokens) const;                     // o and lse, from qkv
  // Computes the attention of one token of each sequence; positions are read from device memory. qkv_TC: what rotates
  // to r first; empty where r was written before.
  void attend_single(Step& step, Tensor o_THd, const Qkv& r, const KvCache& cache, int64_t max_tokens,
                     Tensor qkv_TC) const;
  // Computes the attention of the queries of a run over all keys and values of its sequence.
  void attend_cached(Step& step, Tensor o_THd, Tensor q_THd, Tensor k_UGd, Tensor v_UGd) const;
  void split_and_rotate(Step& step, const Qkv& out, Tensor qkv_TC) const;
  RopeFwd rotation(const Step& step, const Qkv& out, Tensor in_TC) const;  // in: normed() and clipped
  // Recomputes qkv on the step stack if it is neither kept nor held since recompute().
  void project_again(Step& step, const Attention::Input& x, Saved& saved) const;
  void attend_bwd(Step& step, Saved& saved, int64_t tokens, const Attention::Input& x) const;  // dqkv from dy
  // The same for sections of a few kv heads and their query heads, one after another, so that most tensors are those of
  // a section. Returns the kv heads of a section: all heads if there is one.
  int64_t kv_heads_of_section(const LayerContext& c) const;
  void attend_in_sections(Step& step, Saved& saved, int64_t tokens) const;
  void attend_bwd_in_sections(Step& step, Saved& saved, int64_t tokens, const Attention::Input& x) const;
  // Writes dqkv_TC of one section: its columns of q, k and v alone, from those of qkv_TC.
  void attend_section_bwd(Step& step, Tensor dqkv_TC, const Qkv& dr, const HeadRange& kv, Tensor qkv_TC,
                          const Saved& saved) const;
  // Returns the columns of q, k and v of these kv heads, on the step stack.
  Tensor section_of(Step& step, Tensor qkv_TC, const HeadRange& kv) const;
  // Returns the columns of these heads, each so wide, on the step stack.
  Tensor columns_of(Step& step, Tensor x_TA, const HeadRange& heads, int64_t width) const;
  // Returns q, k and v of the section after RoPE, with its sinks. section_TC: what section_of() returned, or empty.
  Qkv rotated_section(Step& step, Tensor qkv_TC, const HeadRange& kv, Tensor section_TC = {}) const;
  template <class F>
  void for_each_part(const HeadRange& kv, F&& fn) const;  // fn(first column of all, first of the section, columns)
  void rotate_bwd(Step& step, Tensor dqkv_TC, const Qkv& grads, Tensor qkv_TC) const;  // adds the norms' gradients
  Tensor normed(Step& step, Tensor qkv_TC) const;  // on the step stack where norms_first_; else qkv itself
  void norm_first_bwd(Step& step, Tensor dqkv_TC, Tensor qkv_TC) const;  // dqkv: the gradient of normed(), then of qkv

  int64_t tp_, T_, H_, G_, d_, window_;  // T: of a micro-batch on all tp ranks; H, G: of this rank
  bool is_long_;                         // model/layers/row_chunks.h
  int64_t section_G_ = 0;                // kv heads of a section
  // Forward has sections too, on sequences of twice that length and with cp. Otherwise its tensors are not the peak.
  bool has_forward_sections_ = false;
  float scale_, eps_, clip_;
  DType dtype_;
  GpuKernels kernels_;
  Group& tp_group_;
  ColumnLinear qkv_;
  RowLinear o_;
  std::unique_ptr<ContextParallel> context_parallel_;
  std::optional<Bias> qkv_bias_, o_bias_;
  QkNorm qk_norm_;
  bool norms_in_rope_, norms_first_;  // by which ops q and k are normalised; neither without norms
  const Param *q_norm_ = nullptr, *k_norm_ = nullptr, *sinks_ = nullptr;
  const Tensor& rope_table_Pd_;
};

}  // namespace moebius
