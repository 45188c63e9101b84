// The pipeline on real ranks: the stages that a rank holds, the lists of its actions, and the
// executor. The lists decide everything (parallel/pipeline/schedule.h), and the executor is one
// loop over any of them. A model on one rank is a pipeline of one stage: each micro-batch is a
// forward and a backward action, without messages.
//
// Hidden states go over the group pp, their gradients over pp_back. So both can be in flight
// between two ranks, and the messages of each group arrive in order.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config/parallel_spec.h"
#include "config/stage_layout.h"
#include "model/model.h"
#include "parallel/pipeline/placement.h"

namespace moebius {

struct PipelineSpec {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;  // parallel.schedule
  int64_t num_virtual = 1;                                    // parallel.vpp
  std::string layout;                                         // parallel.layout
  int64_t num_micro_batches = 1;                              // of a step, on each rank
  bool overlap = true;  // sends overlap with the next passes; false: each is waited for. The same bits
};

// The actions and stages of one rank of the pipeline.
struct PipelineRank {
  StageLayout layout;
  RankProgram step;                       // the passes of a training step, in the order of the schedule
  RankProgram one_micro_batch;            // all passes of one micro-batch, with no other in between: for diagnosis
  RankProgram forward;                    // one micro-batch, forward alone: for evaluation
  std::vector<HeldStage> stages() const;  // of the model on this rank
  int64_t pp_rank = 0;
};

// Error{usage} with the equation that fails: the layout's (config/stage_layout.h) or the
// schedule's. Every list has been simulated.
PipelineRank pipeline_rank(const PipelineSpec& spec, const ModelSpec& model, int64_t num_ranks, int64_t pp_rank);

class Pipeline {
 public:
  // Declares the buffers of the messages. A pipeline of one stage has none, and works on the step
  // stack. model: that of rank.stages(). The references must outlive the pipeline.
  Pipeline(const PipelineRank& rank, Model& model, const Mesh& mesh, MemoryPlan& plan);
  Pipeline(const Pipeline&) = delete;

  using BatchOf = std::function<const MicroBatch&(int64_t m)>;
  // Runs the passes of a whole step, and adds to gradients and to the sums of the step. The loss is
  // on the rank that has it. If an action of this list or of the two below fails, its error is
  // thrown with the action in front, and keeps its kind.
  void run_step(Stream& s, StepStack& stack, const BatchOf& batch) const;
  void run_one_micro_batch(Stream& s, StepStack& stack, const MicroBatch& batch) const;
  void run_forward(Stream& s, StepStack& stack, const MicroBatch& batch) const;
  // Generation: Model::forward_cached of num_tokens rows, stage after stage.
  struct CachedTokens {
    std::span<const KvCache> caches;
    CachedRows rows;
    int64_t num_tokens = 0;
  };
  void run_cached(Stream& s, StepStack& stack, const MicroBatch& batch, const CachedTokens& tokens) const;

  // Runs forward and backward through the stages of this rank without messages, on whatever their
  // memory holds. The device has then loaded and allocated all that it needs at first use, before
  // messages are in flight. Everything except weights is changed. REQUIRES several stages.
  void run_once(Stream& s, StepStack& stack, const MicroBatch& batch) const;

  const PipelineRank& rank() const { return rank_; }

 private:
  using Compute = std::function<void(const PlacedAction& placed, const Tensor& stream_tD)>;
  bool is_one_stage() const { return rank_.layout.stages.size() == 1; }
  Tensor stream_of(StepStack& stack, const Tensor& message_tD, int64_t rows) const;
  void run(Stream& s, StepStack& stack, const RankProgram& list, const BatchOf& batch) const;
  using RowsOf = std::function<int64_t(int64_t stage)>;
  void run(Stream& s, const RankProgram& list, const RowsOf& of_message, const RowsOf& of_stage,
           const Compute& compute) const;
  void compute(Step& step, const PipelineShape& shape, const PlacedAction& placed, const Tensor& message_TD) const;
  void fetch_next(Stream& s, const RankProgram& list, const PlacedAction& placed) const;
  // Rows of the message that a stage sends on, and of the buffer that a pass of a
  // stage works in. mtp: with the hidden states of multi-token prediction, where it is
  // on another stage than the loss.
  int64_t message_rows(int64_t from_stage, bool mtp) const;
  int64_t buffer_rows(int64_t stage, bool mtp) const;
  Group& group(Pass pass) const { return mesh_.group(pass == Pass::forward ? Axis::pp : Axis::pp_back); }

  PipelineRank rank_;
  Model& model_;
  const Mesh& mesh_;
  std::vector<Tensor> buffers_TD_;
};

}  // namespace moebius
