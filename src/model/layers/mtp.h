// A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). At depth k = 1,
// 2, ... the row of token i predicts token i + k + 1:
//
//   h'_i   = W_eh [norm_e(Emb(t_{i+k})); norm_h(h_i^{k-1})]
//   h_i^k  = norm(layer(h'_i))       layer: one like the model's last, with the row's own position
//   loss_k = mean over the rows with such a token of  -log softmax(W_head h_i^k)[t_{i+k+1}]
//
// h^0 is the output of the model's final norm. Embedding and head are the model's. Depth k + 1
// reads the normed output of depth k, as in transformers and Megatron; released models have one
// depth, where there is no difference.
//
// Rows whose token t_{i+k} is in another document or after the sequence's end predict nothing.
// They are the last rows of their document, so no row that predicts sees them. They count in the
// load of experts like any row.
//
// Parameters: those of layer L + k - 1 of a model of L layers, and beside them enorm, hnorm,
// eh_proj (whole on each rank) and shared_head.norm.
#pragma once

#include "model/block.h"
#include "model/layers/linear.h"
#include "model/layers/vocab.h"

namespace moebius {

class Mtp {
 public:
  struct Saved {
    Norm::Saved enorm, hnorm;
    SavedTensor eh_TD2;  // their outputs side by side
    Block::Saved block;
    Norm::Saved norm;
    Tensor dh_TD;  // derivative w.r.t. h^k of the loss of this depth, and in backward also of later depths
    WgradInput deh_output_TD, dembedding_TD;  // derivatives w.r.t. h' and the embedding
  };
  Mtp(const LayerContext& c, int64_t depth);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // h = h^k, before = h^{k-1}: this rank's rows of the micro-batch, all of them.
  void forward(Step& step, const Embedding& embedding, Tensor h_TD, Tensor before_TD, Saved& saved) const;
  // Starts from saved.dh; dbefore += derivative w.r.t. h^{k-1}. Runs both passes, or each
  // separately, as in Block. The embedding's gradient is added in the weight pass.
  void backward(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved) const;
  void backward_input(Step& step, Tensor dbefore_TD, Saved& saved) const;
  void backward_weight(Step& step, const Embedding& embedding, Saved& saved) const;

  const Block& block() const { return block_; }
  int64_t layer() const { return layer_; }  // L + k - 1

 private:
  Tensor token(const Step& step) const { return step.batch.targets(depth_ - 1).target_T; }
  void join(Step& step, Tensor eh_TD2, Tensor e_TD, Tensor h_TD) const;
  void recompute(Step& step, Saved& saved) const;
  // embedding: null where the weight pass comes later.
  void run_backward(Step& step, const Embedding* embedding, Tensor dbefore_TD, Saved& saved) const;

  int64_t depth_, layer_, D_, rows_;
  DType dtype_;
  Norm enorm_, hnorm_;
  Linear eh_proj_;
  Block block_;
  Norm norm_;
};

}  // namespace moebius
