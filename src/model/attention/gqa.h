// Causal grouped-query attention with rotary positions and, where the family has them, biases of q, k, v and o, a sink
// of each head, a window, RMSNorm of q and k, per head or over all heads, and a bound of q, k and v. tp ranks have H /
// tp query heads and G / tp kv heads each (model/layers/linear.h): x and y are a rank's rows t of the residual stream, all
// between is of the rows T of all tp ranks and of its own heads.
#pragma once

#include <optional>

#include "config/model_spec.h"
#include "memory/saved_tensor.h"
#include "model/attention/context_parallel.h"
#include "model/layers/bias.h"
#include "model/layers/linear.h"

namespace moebius {

// Keys and values of the tokens so far, for generation. One sequence: all of its tokens, of this rank's heads.
struct KvCache {
  Tensor k_UGd, v_UGd;  // [max tokens, G, d]
};

class Gqa {
 public:
  // q, k, v stay only as the projection's output; they are made again from it
  // in the backward. x and y are the caller's tensors.
  // dy, dqkv: left by backward_input for backward_weight, on the step stack.
  struct Saved {
    Tensor x_tD;
    SavedTensor qkv_TC, o_THd, lse_TH;
    Tensor dy_tD, dy_TD, dqkv_TC;
  };
  // window: of this layer. Error{usage} when tp does not divide the heads, and of make_context_parallel.
  Gqa(ParamTable& params, const std::string& prefix, const ModelSpec& spec, int64_t window, DType dtype,
      const Mesh& mesh, CpComm cp_comm, const Tensor& rope_table_Pd);
  // tokens: rows of x.
  void declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const;

  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  // Before backward_input: x as it was, and what was not kept once more.
  void remake(Step& step, Tensor x_tD, Saved& saved) const;
  // y = o W_o^T: the end of forward.
  void output(Step& step, Tensor y_tD, const Saved& saved) const;
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const;  // adds the q and k norm gradients
  void backward_weight(Step& step, const Saved& saved) const;

  static void declare_cache(MemoryPlan& plan, const std::string& prefix, const ModelSpec& spec, DType dtype, int64_t tp,
                            int64_t max_tokens, KvCache& cache);
  // Generation: x are this rank's rows of the tokens at positions [first, first + T) of the cached sequence; the keys
  // and values of all T are appended.
  void forward_cached(Step& step, Tensor y_tD, Tensor x_tD, const KvCache& cache, int64_t first) const;

 private:
  Qkv take_qkv(Step& step, int64_t tokens) const;  // with the sinks
  void project(Step& step, Tensor qkv_TC, Tensor x_tD) const;
  void attend(Step& step, Saved& saved, int64_t tokens) const;  // o and lse, from qkv
  void split_and_rotate(Step& step, const Qkv& out, Tensor qkv_TC) const;
  void rotate_bwd(Step& step, Tensor dqkv_TC, const Qkv& grads, Tensor qkv_TC) const;  // adds the norms' gradients
  Tensor normed(Step& step, Tensor qkv_TC) const;  // over all heads, on the step stack; without such norms as it is
  void whole_norm(Step& step, Tensor normed_TC, Tensor qkv_TC) const;
  void whole_norm_bwd(Step& step, Tensor dqkv_TC, Tensor dnormed_TC, Tensor qkv_TC) const;
  void whole_norm_block_bwd(Step& step, Tensor dqkv_TC, Tensor dnormed_TC, Tensor qkv_TC) const;

  int64_t tp_, H_, G_, d_, window_;  // H, G: of this rank
  float scale_, eps_, clip_;
  DType dtype_;
  Group& tp_group_;
  ColumnLinear qkv_;
  RowLinear o_;
  std::unique_ptr<ContextParallel> context_parallel_;
  std::optional<Bias> qkv_bias_, o_bias_;
  QkNorm qk_norm_;
  const Param *q_norm_ = nullptr, *k_norm_ = nullptr, *sinks_ = nullptr;
  const Tensor& rope_table_Pd_;
};

}  // namespace moebius
