// The pipeline of a rank: its stages, the lists of its actions (parallel/pipeline/schedule.h), and the executor, which
// is one loop over such a list. A model on one rank is a pipeline of one stage, in which each micro-batch is a forward
// and a backward action, without messages.
//
// Hidden states are sent over the group pp, and their gradients over pp_back. So both can be in flight between two
// ranks, and the messages of each group arrive in order.
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
  int64_t num_micro_batches = 1;                              // micro-batches of a step, on each rank
  bool overlap = true;  // sends overlap with later passes; false: each send is waited for. The bits are the same
};

// The actions and stages of one rank of the pipeline.
struct PipelineRank {
  StageLayout layout;
  RankProgram step;                       // the passes of a training step, in the order of the schedule
  RankProgram one_micro_batch;            // all passes of one micro-batch, for diagnosis
  RankProgram forward;                    // the forward passes of one micro-batch, for evaluation
  std::vector<HeldStage> stages() const;  // the stages on this rank
  int64_t pp_rank = 0;
};

// Throws Error{usage} with the equation that fails, of the layout (config/stage_layout.h) or of the schedule. The
// simulator has checked every list.
PipelineRank pipeline_rank(const PipelineSpec& spec, const ModelSpec& model, int64_t num_ranks, int64_t pp_rank);

class Pipeline {
 public:
  // Declares the buffers of messages. A pipeline of one stage has none, and works on the step stack.
  // REQUIRES: model has rank.stages(). The references must outlive the pipeline.
  Pipeline(const PipelineRank& rank, Model& model, const Mesh& mesh, MemoryPlan& plan);
  Pipeline(const Pipeline&) = delete;

  using BatchOf = std::function<const MicroBatch&(int64_t m)>;
  // Runs the passes of a whole step, and adds to gradients and to the sums of the step. Only the rank with the last
  // stage gets the loss. The error of an action, here or in the two calls below, is rethrown with the action's name.
  void run_step(Stream& s, StepStack& stack, const BatchOf& batch) const;
  void run_one_micro_batch(Stream& s, StepStack& stack, const MicroBatch& batch) const;
  void run_forward(Stream& s, StepStack& stack, const MicroBatch& batch) const;
  // Runs Model::forward_cached for num_tokens rows, stage after stage.
  struct CachedTokens {
    std::span<const KvCache> caches;
    CachedRows rows;
    int64_t num_tokens = 0;
  };
  void run_cached(Stream& s, StepStack& stack, const MicroBatch& batch, const CachedTokens& tokens) const;

  // Warm-up: runs forward and backward of this rank's stages without messages, on undefined inputs. So everything that
  // the device loads or allocates at first use exists before messages are in flight. Changes everything except
  // weights. REQUIRES: the pipeline has several stages.
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
  // Return the rows of the message that a stage sends, and of the buffer that a pass of a stage works in. mtp: with the
  // hidden states of multi-token prediction, if that is on another stage than the loss.
  int64_t message_rows(int64_t from_stage, bool mtp) const;
  int64_t buffer_rows(int64_t stage, bool mtp) const;
  Group& group(Pass pass) const { return mesh_.group(pass == Pass::forward ? Axis::pp : Axis::pp_back); }

  PipelineRank rank_;
  Model& model_;
  const Mesh& mesh_;
  std::vector<Tensor> buffers_TD_;
};

}  // namespace moebius
