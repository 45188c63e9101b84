// A stage of the model: parts of it that stand together, some of embedding, decoder layers, and final norm with head
// and loss. A model on one rank is one stage; a pipeline cuts it into several, each on its own rank.
//
// Between stages travels the residual stream, [T, D] in the dtype of the computation, summed; and its gradient back. T
// are the rows that this rank has between the projections (model/token_runs.h).
// The norms round the stream before they read it, so that a stage that begins with the sum computes the bits of one
// that adds it itself. A stage works in place: what enters is replaced by what leaves, and a message's buffer serves
// both.
#pragma once

#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "config/stage_layout.h"
#include "model/block.h"
#include "model/vocab.h"

namespace moebius {

// What the stages of a model have in common. The references outlive them.
struct StageContext {
  ParamTable& params;
  MemoryPlan& plan;
  const ModelSpec& model;
  const BalanceSpec& balance;
  const Mesh& mesh;
  const Tensor& rope_table_Pd;
  const Tensor& loss_sum_1;  // f64: what the stage with the loss adds to
  DType dtype = DType::f32;
  BatchShape shape;
  uint64_t seed = 0;
  std::string dispatcher = "auto";  // of the MoE layers
  bool fusion = true;               // of the dense layers (model/mlp.h)
};

class Stage {
 public:
  // What the forward pass of one micro-batch leaves for its backward pass.
  struct Saved {
    std::vector<Block::Saved> blocks;  // per layer; one for all in inference
    Norm::Saved final_norm;
    Tensor dfinal_TD;  // the loss's derivative by the final norm's output
  };

  // Declares every parameter of the stage.
  Stage(const StageContext& context, const StageSpec& spec);
  Stage(const Stage&) = delete;
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;
  // What one micro-batch needs at a time: the final norm's output and the token losses.
  void declare_output(MemoryPlan& plan);
  void init_state(Stream& s) const;  // the routers' starting state

  // stream: in, the residual stream before the stage, unless it has the embedding; out, behind it, undefined where it
  // has the final norm.
  void forward(Step& step, Tensor stream_TD, Saved& saved) const;
  // REQUIRES spec().loss. Adds the sum of weighted token losses to the model's loss_sum. With gradients the loss's
  // derivative is made in the same pass, since its logits are never held: backward() continues from it.
  void forward_loss(Step& step, Saved& saved, bool with_gradients) const;
  // dstream: in, the derivative by the stream behind the stage, unless it has the loss; out, by the stream before it.
  void backward(Step& step, Tensor dstream_TD, Saved& saved) const;

  // Generation; caches are of the stage's layers.
  void forward_cached(Step& step, Tensor stream_TD, Saved& saved, std::vector<KvCache>& caches, int64_t first) const;
  // Logits (f32) of the last forward pass over the final norm's rows [begin, end). REQUIRES spec().loss.
  void logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end) const;

  const StageSpec& spec() const { return spec_; }
  const std::deque<Block>& blocks() const { return blocks_; }
  const Param* embedding() const {
    return embedding_ ? &embedding_->table() : nullptr;
  }                                                                        // null where the stage has none
  const Param* head() const { return head_ ? &head_->table() : nullptr; }  // the same
  const Tensor& token_loss() const { return loss_T_; }  // f32, of all tokens of the last micro-batch here, weighted
  static Block::Saved& saved_of(Saved& saved, size_t i) { return saved.blocks[saved.blocks.size() == 1 ? 0 : i]; }
  static const Block::Saved& saved_of(const Saved& saved, size_t i) {
    return saved.blocks[saved.blocks.size() == 1 ? 0 : i];
  }
  // Adds what a forward pass kept, by name, in the order it was computed; for diagnosis.
  void add_kept(std::vector<std::pair<std::string, Tensor>>& kept, const Saved& saved) const;

 private:
  void declare_end(const StageContext& context);
  void leave(Step& step, const Residual& residual, Saved& saved) const;

  StageSpec spec_;
  const ParamTable& params_;
  const ModelSpec& model_;
  DType dtype_;
  BatchShape shape_;
  int64_t stream_rows_;
  ModelUse use_;
  const Tensor& loss_sum_1_;
  std::optional<Embedding> embedding_;
  std::deque<Block> blocks_;
  std::vector<ParamSpan> of_block_;
  ParamSpan of_embedding_, of_end_;  // final norm and head
  std::optional<Norm> final_norm_;
  std::optional<LmHead> head_;
  Tensor final_TD_, loss_T_;
};

}  // namespace moebius
