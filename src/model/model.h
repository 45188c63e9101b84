// The model on this rank: the whole model, or this rank's stages of a pipeline.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "config/policy_spec.h"
#include "device/gpu_kernels.h"
#include "model/catalog.h"
#include "model/moe/router/router_sums.h"
#include "model/stage.h"

namespace moebius {

// A stage that is on this rank.
struct HeldStage {
  StageSpec spec;
  // The maximum number of micro-batches in flight, between the start of forward and the end of the last backward pass.
  // The plan has this many sets of saved tensors.
  int64_t num_saved = 1;
  // True if other passes may run between backward_input and backward_weight of a micro-batch
  // (MemoryPlan::split_backward).
  bool splits_backward = false;
};
// Returns the model as one stage.
std::vector<HeldStage> whole_model(const ModelSpec& model);

// The stage of a pass, as its index among this rank's virtual stages, and the micro-batch's set of saved tensors.
struct StagePass {
  int64_t virtual_stage = 0;
  int64_t saved_set = 0;
  bool backward_follows = false;  // after a forward: the next pass on this rank is the backward of this micro-batch
};

// The arguments that a model is built with. What they refer to outlives the model.
struct ModelContext {
  const ModelSpec& model;
  const BalanceSpec& balance;
  const PrecisionSpec& precision;
  const Mesh& mesh;
  MemoryPlan& plan;
  ModelUse use = ModelUse::inference;
  BatchShape shape;
  int64_t max_positions = 0;                              // rows of the rotary table
  uint64_t seed = 0;                                      // seed of random draws in training
  std::vector<HeldStage> stages = {};                     // stages on this rank; empty: the whole model
  std::vector<std::string> freeze = {};                   // patterns of frozen parameters, as in ParamTable
  DispatcherKind dispatcher = DispatcherKind::automatic;  // how MoE layers exchange rows: model/moe/dispatcher.h
  ExpertOverlap expert_overlap = ExpertOverlap::none;     // what overlaps with the exchange of rows
  GpuKernels kernels = {};                                // kernels of a GPU, whose scratch a dry run counts
  bool fusion = true;                                     // fuses ops of dense layers: model/layers/mlp.h
  LoraSpec lora = {};                                     // adapters: model/lora/adapter.h
  bool shards_weights = false;                            // parallel.fsdp
  double expert_rows = 0;                                 // memory.expert_rows: model/moe/expert_rows.h
  // The maximum number of (MoE layer on this rank, micro-batch) pairs between forward and backward; 0: as the stages'
  // num_saved gives it.
  int64_t moe_passes_in_flight = 0;
  int64_t expert_chunk = 0;         // as LayerContext's
  OptimizerSpec optimizer = {};     // gives the formats of masters and gradients: ParamTable::set_formats
  bool measures_precision = false;  // log.precision
};

class MaxLogits;

class Model {
 public:
  explicit Model(const ModelContext& c);  // declares every tensor that it owns in the plan
  ~Model();
  Model(const Model&) = delete;

  // Called after bind(). Fills constants (the RoPE table) and the initial state of the routers. Parameters are set by
  // params().init(), or loaded.
  void init_state(Stream& s) const;

  // The passes of one stage, as model/stage.h says. A micro-batch goes through the stages in their
  // order with forward and forward_loss, and back with backward (parallel/pipeline/pipeline.h).
  void forward(Step& step, const StagePass& pass, Tensor stream_TD, bool with_gradients);
  void forward_loss(Step& step, const StagePass& pass, bool with_gradients);  // does nothing if the stage has no loss
  void backward(Step& step, const StagePass& pass, Tensor dstream_TD);
  // The two backward passes separately. REQUIRES: HeldStage::splits_backward.
  void backward_input(Step& step, const StagePass& pass, Tensor dstream_TD);
  void backward_weight(Step& step, const StagePass& pass);

  // Returns the offload of activations; null without memory.offload, and in inference.
  ActivationOffload* offload() const { return offload_.get(); }
  // Called before and after a list of passes with gradients, for the offload (memory/activation_offload.h).
  void begin_passes();
  void end_passes(Stream& s);
  void fetch(Stream& s, const StagePass& pass) const;  // Stage::fetch
  // Called once after the plan is bound, before any pass: creates the streams of the offload on a GPU.
  void prepare_offload(const Stream& s);

  // Stage::logits: for parity checks and generation. REQUIRES has_head().
  void logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end, int64_t depth = 0) const;

  // Generation: the pass of a stage over the next tokens of sequences, which are in step.batch. REQUIRES: tp divides
  // the number of rows.
  void forward_cached(Step& step, const StagePass& pass, Tensor stream_tD, std::span<const KvCache> caches,
                      const CachedRows& rows);
  // Stage::row_logits of row `row` of the last forward_cached(), which had num_tokens rows.
  void row_logits(Step& step, Tensor logits_1V, int64_t row, int64_t num_tokens) const;
  // Declares one cache for each layer on this rank, in the order of the stages. num_tokens: of all sequences.
  void declare_caches(MemoryPlan& plan, std::vector<KvCache>& caches, int64_t num_tokens) const;

  // Returns the catalog of the whole model, including the stages and shards of other ranks.
  ModelCatalog whole_catalog() const { return catalog(lora_); }
  // Returns the same without adapters, as a folder of weights holds the model.
  ModelCatalog base_catalog() const { return catalog({}); }

  ParamTable& params() { return params_; }
  const ParamTable& params() const { return params_; }
  const ModelSpec& spec() const { return spec_; }
  DType dtype() const { return dtype_; }
  int64_t stream_rows() const { return stream_rows_; }  // of the residual stream on this rank
  int64_t num_mtp_depths() const { return num_mtp_; }   // computed depths of multi-token prediction
  const std::vector<HeldStage>& stages() const { return held_; }
  bool has_head() const { return held_.back().spec.loss; }
  bool holds_mtp() const { return held_.back().spec.num_mtp > 0; }  // modules of multi-token prediction on this rank
  // This rank's embedding table or its copy, if the head or multi-token prediction uses the table on another rank too;
  // else null.
  const Param* tied_elsewhere() const;
  const Tensor& loss_sum() const { return loss_sum_1_; }  // f64 [1], of this rank; 0 if the loss is on another rank
  // f64 [num_mtp], of each depth of multi-token prediction, as loss_sum; empty without it.
  const Tensor& mtp_loss_sum() const { return mtp_loss_sum_D_; }
  const Tensor& token_loss() const { return stages_.back().token_loss(); }  // f32 [T] of the last micro-batch, weighted
  // The MoE layers that this rank computes, in order, those of multi-token prediction last. layer: the index in the
  // model. saved: the layer's part of the first set of saved tensors.
  struct MoeLayer {
    int64_t layer;
    const Moe* moe;
    const Moe::Saved* saved;
  };
  std::vector<MoeLayer> moe_layers() const;
  // The metrics of all MoE layers.
  const RouterSums& router_sums() const { return router_sums_; }
  // The memory of expert rows; null without memory.expert_rows.
  const ExpertRows* expert_rows() const { return expert_rows_.get(); }
  const QuantizeStats* quantize_stats() const { return quantize_stats_.get(); }  // null without log.precision
  const MaxLogits* max_logits() const { return max_logits_.get(); }              // null without optimizer.qk_clip
  // Returns the tensors that the last forward pass of a virtual stage saved in its first set, in the order in which
  // they were computed; for diagnosis.
  std::vector<KeptTensor> kept_tensors(size_t virtual_stage) const;
  ParamSpan params_of(size_t virtual_stage) const { return spans_[virtual_stage]; }

 private:
  ModelCatalog catalog(const LoraSpec& lora) const;

  ModelSpec spec_;
  BalanceSpec balance_;
  std::vector<std::string> freeze_;
  LoraSpec lora_;
  DType dtype_;
  int64_t tp_, stream_rows_, num_mtp_;
  ParamTable params_;
  Tensor rope_table_Pd_, loss_sum_1_, mtp_loss_sum_D_;
  std::vector<HeldStage> held_;
  std::unique_ptr<DirectWindow> window_;  // used by the direct dispatcher
  std::unique_ptr<ExpertRows> expert_rows_;
  RouterSums router_sums_;
  std::unique_ptr<QuantizeStats> quantize_stats_;  // null without log.precision
  std::unique_ptr<MaxLogits> max_logits_;          // null without optimizer.qk_clip, and outside of training
  std::unique_ptr<ActivationOffload> offload_;     // null without memory.offload, and in inference
  std::deque<Stage> stages_;                       // [virtual stage]
  std::vector<ParamSpan> spans_;                   // [virtual stage], of params_
  std::vector<std::vector<Stage::Saved>> saved_;   // [virtual stage][set]
};

}  // namespace moebius
