// A stage is a consecutive part of the model: any of the embedding, decoder layers, and the final norm with head, loss
// and multi-token prediction. Without a pipeline the model is one stage.
//
// A stage sends the residual stream to the next one: [T, D] in the dtype of the computation, with the last layer's
// output added. The next stage sends its gradient back. T is the number of this rank's rows of the residual stream
// (model/attention/token_runs.h).
//
// The norms round the sum before they read it, so cutting the model into stages changes no bit. A stage works in place:
// its result replaces its input, and one buffer serves both messages.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "config/stage_layout.h"
#include "memory/activation_offload.h"
#include "model/layers/mtp.h"

namespace moebius {

// The arguments of a stage's constructor. What they refer to must outlive the stage.
struct StageContext {
  LayerContext layers;
  const Tensor& loss_sum_1;      // f64: the stage with the loss adds its losses to it
  const Tensor& mtp_loss_sum_D;  // the same for each depth of multi-token prediction; only with shape.num_mtp
  // The offload of this rank's activations; null: nothing is offloaded, whatever memory.offload is.
  ActivationOffload* offload = nullptr;
};

class Stage {
 public:
  // The tensors that the passes of one micro-batch save for later passes.
  struct Saved {
    std::vector<Block::Saved> blocks;     // one per layer; layers of a kind without backward passes share one
    std::vector<OffloadedLayer> on_host;  // one per layer, if memory.offload is on
    Norm::Saved final_norm;
    Tensor dfinal_TD;             // the loss's derivative w.r.t. the final norm's output
    std::vector<Mtp::Saved> mtp;  // one per depth
    std::vector<Tensor> dmtp_TD;  // derivative w.r.t. the output of each depth, if the modules are on another stage
  };

  // Declares every parameter of the stage.
  Stage(const StageContext& context, const StageSpec& spec);
  Stage(const Stage&) = delete;
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;
  // Declares the final norm's output and the token losses, which one micro-batch needs at a time.
  void declare_output(MemoryPlan& plan);
  void init_state(Stream& s) const;  // sets the initial state of the routers

  // stream [T, D]: on entry the residual stream before the stage; not read if the stage has the embedding. On return
  // the stream after the stage; undefined if the stage has the final norm.
  //
  // If the loss is on another stage than multi-token prediction, the stream between the two is h^0, ..., h^n
  // (model/layers/mtp.h), one after the other. Without gradients it is h^0 alone.
  //
  // backward_follows: the next pass on this rank is backward() of this micro-batch. Then the last layers are not
  // offloaded, since backward needs them at once.
  void forward(Step& step, Tensor stream_TD, Saved& saved, bool with_gradients = false,
               bool backward_follows = false) const;
  // Starts to copy the offloaded activations of the first layers of a backward pass to the device, so that the copy
  // overlaps with the work before that pass. REQUIRES: no other pass of this rank runs in between.
  void fetch(Stream& s, const Saved& saved) const;
  // Adds the sum of weighted token losses to the model's loss_sum. With gradients, the derivative of the loss and the
  // gradient of the head are computed in the same pass, since the logits are never stored; the backward passes start
  // from that derivative. Multi-token prediction runs only with gradients, and adds its losses to mtp_loss_sum.
  // REQUIRES: spec().loss.
  void forward_loss(Step& step, Saved& saved, bool with_gradients) const;
  // Runs both backward passes, layer by layer.
  // dstream: on entry the derivative w.r.t. the stream after the stage; not read if the stage has the loss. On return
  // the derivative w.r.t. the stream before the stage.
  void backward(Step& step, Tensor dstream_TD, Saved& saved) const;
  // The two backward passes separately, with the same bits. Passes on other sets of saved tensors may come between
  // them. Gradients are complete after the second. REQUIRES: declare_saved() with MemoryPlan::split_backward.
  void backward_input(Step& step, Tensor dstream_TD, Saved& saved) const;
  void backward_weight(Step& step, Saved& saved) const;

  // The pass of generation. caches: one per layer of the stage. stream: as in forward(), this rank's rows.
  void forward_cached(Step& step, Tensor stream_tD, Saved& saved, std::span<const KvCache> caches,
                      const CachedRows& rows) const;
  // Writes the logits (f32) of one row of the last forward_cached(), in which each tp rank had t rows.
  // REQUIRES: spec().loss.
  void row_logits(Step& step, Tensor logits_1V, int64_t row, int64_t t) const;
  // Writes the logits (f32) of rows [begin, end) of the last forward pass: of the model at depth 0, of multi-token
  // prediction at depth k. REQUIRES: spec().loss.
  void logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end, int64_t depth = 0) const;

  const StageSpec& spec() const { return spec_; }
  const std::deque<Block>& blocks() const { return blocks_; }
  // The tables of this stage; null where it has none.
  const Param* embedding() const { return embedding_ ? &embedding_->table() : nullptr; }
  const Param* head() const { return head_ ? &head_->table() : nullptr; }
  // The copy of another stage's embedding; null if there is none.
  const Param* embedding_copy() const;
  // Returns whether the stage computes multi-token prediction (BatchShape::num_mtp).
  bool predicts_mtp() const { return !mtp_.empty() && shape_.num_mtp > 0; }
  const std::deque<Mtp>& mtp() const { return mtp_; }   // [depth - 1]
  const Tensor& token_loss() const { return loss_T_; }  // f32, weighted, of the last micro-batch
  Block::Saved& saved_of(Saved& saved, size_t i) const { return saved.blocks[set_of_block_[i]]; }
  const Block::Saved& saved_of(const Saved& saved, size_t i) const { return saved.blocks[set_of_block_[i]]; }
  // Returns the tensors that a forward pass saved, in the order in which they were computed; of layers that share a
  // set, those of the last. For diagnosis.
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
  // Copy the outputs of the norms to and from the stream, if norm and loss are on two stages.
  void write_hidden_states(Step& step, Tensor stream_TD, bool with_gradients) const;
  void read_hidden_states(Step& step, Tensor stream_TD, bool with_gradients) const;
  void mtp_loss(Step& step, const Saved& saved) const;
  const Embedding& mtp_embedding() const { return embedding_ ? *embedding_ : *embedding_copy_; }
  // The parameters that the head reads, and the embedding that multi-token prediction reads.
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
  void embedding_gradient(Step& step, Tensor dstream_TD) const;
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
  std::vector<size_t> set_of_block_;  // for each layer, the index into Saved::blocks
  size_t num_block_sets_ = 0;
  std::vector<ParamSpan> of_block_;
  ActivationOffload* offload_;
  std::vector<int> slot_of_block_;   // -1: the block is not offloaded. Empty: no block is
  size_t first_backward_ = 0;        // the lowest block whose backward passes are computed
  bool is_gradient_used_ = true;     // the derivative w.r.t. the input of that block is needed
  ParamSpan of_embedding_, of_end_;  // of_end_: final norm, head, copy of the embedding
  std::optional<Norm> final_norm_;
  std::optional<LmHead> head_;
  std::optional<Embedding> embedding_copy_;  // used by multi-token prediction on a stage without the embedding
  std::deque<Mtp> mtp_;
  std::vector<ParamSpan> of_mtp_;
  Tensor final_TD_, loss_T_;
  std::vector<Tensor> mtp_TD_;  // [depth - 1]: the head's input at that depth
};

}  // namespace moebius
