// A stage of the model: consecutive parts of it, some of embedding, decoder layers, and final norm
// with head, loss and multi-token prediction. A model on one rank is one stage; a pipeline cuts it
// into several, each on its own rank.
//
// The residual stream travels between stages: [T, D] in the dtype of the computation, summed. Its
// gradient travels back. T is the number of rows that this rank has between the projections
// (model/attention/token_runs.h).
//
// The norms round the stream before they read it. So a stage that begins with the sum computes the
// same bits as one that adds it itself. A stage works in place: its result replaces its input, and
// one buffer serves both messages.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "config/stage_layout.h"
#include "memory/activation_offload.h"
#include "model/layers/mtp.h"

namespace moebius {

// The arguments that a stage is built with. What they refer to outlives the stage.
struct StageContext {
  LayerContext layers;
  const Tensor& loss_sum_1;      // f64: the stage with the loss adds its losses to it
  const Tensor& mtp_loss_sum_D;  // the same of each depth of multi-token prediction; only with shape.num_mtp
  // The layers of this rank whose activations are on the host; null: there are none, whatever memory.offload names.
  ActivationOffload* offload = nullptr;
};

class Stage {
 public:
  // The tensors that the passes of one micro-batch leave for later ones.
  struct Saved {
    std::vector<Block::Saved> blocks;     // per layer; one for all layers of a kind that have no backward passes
    std::vector<OffloadedLayer> on_host;  // per layer, with memory.offload
    Norm::Saved final_norm;
    Tensor dfinal_TD;             // the loss's derivative w.r.t. the final norm's output
    std::vector<Mtp::Saved> mtp;  // per depth
    std::vector<Tensor> dmtp_TD;  // per depth, that w.r.t. its output, if the modules are elsewhere
    WgradInput dembedding_TD;     // the derivative w.r.t. the embedding's output
  };

  // Declares every parameter of the stage.
  Stage(const StageContext& context, const StageSpec& spec);
  Stage(const Stage&) = delete;
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;
  // Declares the final norm's output and the token losses, which one micro-batch needs at a time.
  void declare_output(MemoryPlan& plan);
  void init_state(Stream& s) const;  // the routers' starting state

  // stream: on entry the residual stream before the stage, unless the stage has the embedding. On
  // return it is the stream after the stage, and undefined if the stage has the final norm.
  //
  // If multi-token prediction is on another stage than the loss, the stream between the two is h^0
  // .. h^n (model/layers/mtp.h), one after the other. Without gradients it is h^0 alone.
  //
  // backward_follows: the next pass of this rank is backward() of this micro-batch. Then what the last layers keep on the
  // host is not copied there, since it is still here.
  void forward(Step& step, Tensor stream_TD, Saved& saved, bool with_gradients = false,
               bool backward_follows = false) const;
  // Starts to bring back what the first layers of a backward pass read from the host, beside what comes before that pass.
  // REQUIRES that no other pass of this rank runs in between. Nothing where all of it is here.
  void fetch(Stream& s, const Saved& saved) const;
  // REQUIRES spec().loss. Adds the sum of weighted token losses to the model's loss_sum. With
  // gradients, the loss's derivative and the head's gradient are computed in the same pass, since
  // its logits are never held. The backward passes continue from that derivative. Multi-token
  // prediction runs only with gradients; its losses are added to mtp_loss_sum.
  void forward_loss(Step& step, Saved& saved, bool with_gradients) const;
  // dstream: on entry the derivative w.r.t. the stream after the stage, unless the stage has the
  // loss. On return it is the derivative w.r.t. the stream before the stage. Runs both backward
  // passes, layer after layer.
  void backward(Step& step, Tensor dstream_TD, Saved& saved) const;
  // The two passes separately; the bits are the same. Other passes may come between them, on other
  // sets of saved tensors. A gradient may be reduced after the second. REQUIRES: declare_saved()
  // with MemoryPlan::split_backward.
  void backward_input(Step& step, Tensor dstream_TD, Saved& saved) const;
  void backward_weight(Step& step, Saved& saved) const;

  // Generation; caches are of the stage's layers. stream: this rank's rows, as in forward().
  void forward_cached(Step& step, Tensor stream_tD, Saved& saved, std::span<const KvCache> caches,
                      const CachedRows& rows) const;
  // REQUIRES spec().loss. Writes the logits (f32) of one of the rows that all tp ranks have put
  // through forward_cached(), with t rows each.
  void row_logits(Step& step, Tensor logits_1V, int64_t row, int64_t t) const;
  // Logits (f32) of the last forward pass for the rows [begin, end) of the final norm at depth 0,
  // or of multi-token prediction at depth k. REQUIRES spec().loss.
  void logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end, int64_t depth = 0) const;

  const StageSpec& spec() const { return spec_; }
  const std::deque<Block>& blocks() const { return blocks_; }
  // The tables of this stage; null where it has none.
  const Param* embedding() const { return embedding_ ? &embedding_->table() : nullptr; }
  const Param* head() const { return head_ ? &head_->table() : nullptr; }
  // A parameter here that is a copy of the embedding of another stage; null where there is none.
  const Param* embedding_copy() const;
  // Returns whether it has multi-token prediction and computes it: BatchShape::num_mtp.
  bool predicts_mtp() const { return !mtp_.empty() && shape_.num_mtp > 0; }
  const std::deque<Mtp>& mtp() const { return mtp_; }   // [depth - 1]
  const Tensor& token_loss() const { return loss_T_; }  // f32, weighted, of the last micro-batch
  Block::Saved& saved_of(Saved& saved, size_t i) const { return saved.blocks[set_of_block_[i]]; }
  const Block::Saved& saved_of(const Saved& saved, size_t i) const { return saved.blocks[set_of_block_[i]]; }
  // The tensors that a forward pass kept, in order, and of layers that share a set those of the last; for diagnosis.
  std::vector<KeptTensor> kept(const Saved& saved) const;

 private:
  void share_block_sets();
  void choose_offloaded(const MemoryPlan& plan);
  bool is_offloaded(size_t i) const { return !slot_of_block_.empty() && slot_of_block_[i] >= 0; }
  void run_offloaded(Step& step, size_t i, Residual& residual, Saved& saved, bool backward_follows) const;
  void fetch_below(Stream& s, size_t end, const Saved& saved) const;
  void declare_end(const LayerContext& c);
  int64_t num_mtp_depths() const { return spec_.norm || spec_.loss ? shape_.num_mtp : 0; }
  Tensor hidden_TD(const Tensor& stream_TD, int64_t depth) const {
    return stream_TD.rows(depth * stream_rows_, (depth + 1) * stream_rows_);
  }
  Tensor dhidden_TD(const Saved& saved, int64_t depth) const;
  const Tensor& output_TD(int64_t depth) const { return depth == 0 ? final_TD_ : mtp_TD_[depth - 1]; }
  // The norms' outputs, to and from the stream, where norm and loss are on two stages.
  void write_hidden_states(Step& step, Tensor stream_TD, bool with_gradients) const;
  void read_hidden_states(Step& step, Tensor stream_TD, bool with_gradients) const;
  void mtp_loss(Step& step, const Saved& saved) const;
  const Embedding& mtp_embedding() const { return embedding_ ? *embedding_ : *embedding_copy_; }
  // The parameters that the head reads, and those that multi-token prediction reads beside its own.
  const ParamSpan& of_head() const { return embedding_ && model_.tie_word_embeddings ? of_embedding_ : of_end_; }
  const ParamSpan& of_mtp_embedding() const { return embedding_ ? of_embedding_ : of_end_; }
  void forward_mtp(Step& step, Saved& saved) const;
  // From the embedding to the final norm; run_block(i, residual) computes block i.
  template <class RunBlock>
  void forward_layers(Step& step, Residual residual, Saved& saved, RunBlock run_block) const;
  void run_backward(Step& step, Tensor dstream_TD, Saved& saved, bool with_weights) const;
  void exchange_hidden_gradients(Step& step, Tensor dstream_TD, const Saved& saved) const;
  void backward_mtp(Step& step, Saved& saved, bool with_weights) const;
  void backward_layers(Step& step, Tensor dstream_TD, Saved& saved, bool with_weights) const;
  void backward_block(Step& step, size_t i, Tensor dstream_TD, Saved& saved, bool with_weights) const;
  void embedding_gradient(Step& step, const Saved& saved) const;
  void end_gradients(Step& step) const;
  void gather_block(Step& step, size_t i) const;
  void find_lowest_trained(const LayerContext& c);
  bool trains_embedding() const { return embedding_ && embedding_->table().has_grad; }
  void leave(Step& step, const Residual& residual, Saved& saved) const;

  StageSpec spec_;
  ParamTable& params_;
  const ModelSpec& model_;
  DType dtype_;
  BatchShape shape_;
  int64_t stream_rows_;
  ModelUse use_;
  const Tensor &loss_sum_1_, &mtp_loss_sum_D_;
  std::optional<Embedding> embedding_;
  std::deque<Block> blocks_;
  std::vector<size_t> set_of_block_;  // which of Saved::blocks a layer uses
  size_t num_block_sets_ = 0;
  std::vector<ParamSpan> of_block_;
  ActivationOffload* offload_;
  std::vector<int> slot_of_block_;   // -1: what it keeps is on the device. Empty: that holds for all blocks
  size_t first_backward_ = 0;        // the lowest block whose backward passes are computed
  bool is_gradient_used_ = true;     // that by the input of this block
  ParamSpan of_embedding_, of_end_;  // of_end_: final norm, head, copy of the embedding
  std::optional<Norm> final_norm_;
  std::optional<LmHead> head_;
  std::optional<Embedding> embedding_copy_;  // for multi-token prediction on a stage without the embedding
  std::deque<Mtp> mtp_;
  std::vector<ParamSpan> of_mtp_;
  Tensor final_TD_, loss_T_;
  std::vector<Tensor> mtp_TD_;  // [depth - 1]: the head's input at that depth
};

}  // namespace moebius
