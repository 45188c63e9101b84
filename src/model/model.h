// The whole model on this rank: embedding, decoder layers, final norm and the language-model loss.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "config/policy_spec.h"
#include "model/block.h"
#include "model/vocab.h"

namespace moebius {

class Model {
 public:
  // Declares every tensor it owns in the plan. max_positions: rows of the rotary table. The references must outlive the
  // model.
  Model(const ModelSpec& model, const BalanceSpec& balance, const PrecisionSpec& precision, const Mesh& mesh,
        MemoryPlan& plan, ModelUse use, const BatchShape& shape, int64_t max_positions, uint64_t seed);
  Model(const Model&) = delete;

  // After bind(): constants (the rotary table) and the routers' starting state. Parameters: params().init() or loaded.
  void init_state(Stream& s) const;

  // One micro-batch is  forward_hidden, forward_loss, backward.
  // Embedding through the final norm, for the first num_tokens rows of this rank's residual stream.
  void forward_hidden(Step& step, int64_t num_tokens);
  // The sum of weighted token losses is added to loss_sum. With gradients the loss's derivative is made in the same
  // pass, since its logits are never held: backward() continues from it.
  void forward_loss(Step& step, bool with_gradients);
  void backward(Step& step);

  // Logits (f32) of the last forward pass over the final norm's rows [begin, end); for parity checks and generation.
  void logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end) const;

  // Generation of one sequence: the next T tokens of step.batch, at positions [first, first + T).
  void forward_cached(Step& step, std::vector<KvCache>& caches, int64_t first, int64_t num_tokens);
  void declare_caches(MemoryPlan& plan, std::vector<KvCache>& caches, int64_t max_tokens) const;

  ParamTable& params() { return params_; }
  const ParamTable& params() const { return params_; }
  const ModelSpec& spec() const { return spec_; }
  const Tensor& loss_sum() const { return loss_sum_1_; }  // f64 [1]
  const Tensor& token_loss() const { return loss_T_; }    // f32 [rows] of the last micro-batch, weighted
  // MoE layers in order, with their layer index.
  struct MoeLayer {
    int64_t layer;
    const Moe* moe;
    const Moe::Saved* saved;
  };
  std::vector<MoeLayer> moe_layers() const;
  // What the last forward pass kept, by name, in the order it was computed; for diagnosis.
  std::vector<std::pair<std::string, Tensor>> kept_tensors() const;

 private:
  Block::Saved& saved_of(size_t layer) { return saved_[saved_.size() == 1 ? 0 : layer]; }
  const Block::Saved& saved_of(size_t layer) const { return saved_[saved_.size() == 1 ? 0 : layer]; }

  ModelSpec spec_;
  DType dtype_;
  BatchShape shape_;
  const Mesh& mesh_;
  ParamTable params_;
  Tensor rope_table_Pd_;
  Embedding embedding_;
  std::deque<Block> blocks_;
  Norm final_norm_;
  LmHead head_;

  std::vector<Block::Saved> saved_;  // per layer; one for all without gradients
  Norm::Saved saved_final_;
  Tensor final_TD_, dfinal_TD_;  // the final norm's output, and the loss's derivative by it
  Tensor loss_T_, loss_sum_1_;
};

}  // namespace moebius
