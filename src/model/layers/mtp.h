// A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). At depth k = 1,
// 2, ... the row of token i predicts token i + k + 1:
//
//   h'_i   = W_eh [norm_e(Emb(t_{i+k})); norm_h(h_i^{k-1})]
//   h_i^k  = norm(layer(h'_i))       layer: one like the model's last, with the row's own position
//   loss_k = mean over the rows with such a token of  -log softmax(W_head h_i^k)[t_{i+k+1}]
//
// h^0 is the output of the model's final norm, and embedding and head are the model's. Depth k + 1 reads the normalised
// output of depth k, as in transformers and Megatron. (Released models have one depth, where this makes no difference.)
//
// Rows whose token t_{i+k} is in another document or after the end of the sequence predict nothing. They are the last
// rows of their document, so no predicting row attends to them. They count in the load of experts like any row.
//
// The parameters are those of layer L + k - 1 of a model of L layers, and enorm, hnorm, eh_proj (whole on each rank)
// and shared_head.norm.
#pragma once

#include "model/block.h"
#include "model/layers/linear.h"
#include "model/layers/vocab.h"

namespace moebius {

class Mtp {
 public:
  struct Saved {
    Norm::Saved enorm, hnorm;
    SavedTensor eh_TD2;  // the outputs of enorm and hnorm, concatenated
    Block::Saved block;
    Norm::Saved norm;
    Tensor dh_TD;              // derivative of the losses w.r.t. h^k: of this depth, in backward also of later depths
    WgradInput deh_output_TD;  // derivative w.r.t. h'
  };
  Mtp(const LayerContext& c, int64_t depth);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // h: h^k. before: h^{k-1}. Both have all of this rank's rows of the micro-batch.
  void forward(Step& step, const Embedding& embedding, Tensor h_TD, Tensor before_TD, Saved& saved) const;
  // Starts from saved.dh, and adds the derivative w.r.t. h^{k-1} to dbefore. backward() runs both passes, as in Block.
  // backward_input() adds the gradient of the embedding, so that its order does not depend on when weights follow: the
  // loss adds to a tied embedding too.
  void backward(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved) const;
  void backward_input(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved) const;
  void backward_weight(Step& step, Saved& saved) const;

  const Block& block() const { return block_; }
  int64_t layer() const { return layer_; }  // L + k - 1

 private:
  Tensor token(const Step& step) const { return step.batch.targets(depth_ - 1).target_T; }
  void join(Step& step, Tensor eh_TD2, Tensor e_TD, Tensor h_TD) const;
  void recompute(Step& step, Saved& saved) const;
  void run_backward(Step& step, const Embedding& embedding, Tensor dbefore_TD, Saved& saved, bool with_weights) const;

  int64_t depth_, layer_, D_, rows_;
  DType dtype_;
  Norm enorm_, hnorm_;
  Linear eh_proj_;
  Block block_;
  Norm norm_;
};

}  // namespace moebius
