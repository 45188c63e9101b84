// What every layer gets: where to run, scratch, and the micro-batch. It must not grow.
#pragma once

#include <vector>

#include "config/parallel_spec.h"
#include "core/arena.h"
#include "device/device.h"
#include "memory/plan.h"

namespace moebius {

// The sizes that a model is planned for: of the part of a micro-batch that the tp ranks of one place have together
// (model/attention/token_runs.h).
struct BatchShape {
  int64_t batch = 1;  // sequences
  int64_t seq = 1;    // tokens a sequence here: 1 / cp of it
  // Scopes of the sequence balance loss in it: sequences, or documents when they are kept apart.
  int64_t max_segments = 1;
  // Sequences hold documents that do not see each other, where doc_start_T says; else a token sees all before it.
  bool documents = true;
  CpComm cp_comm = CpComm::allgather;
  // Depths of multi-token prediction that the batch has targets for: all of the model's, or 0, and then its modules are
  // held and not computed.
  int64_t num_mtp = 0;
  int64_t tokens() const { return batch * seq; }
};

// What a head is to predict at each row.
struct Targets {
  Tensor target_T;          // i32
  Tensor weight_T;          // f32, of each in the loss
  double loss_scale = 1.0;  // 1 / sum of these weights in the global batch
  // f32 [1], what the weighted losses are multiplied with in the objective: loss_scale, times MicroBatch::mtp_coeff
  // where they are of multi-token prediction. A recorded step reads it anew; kept by the engine.
  Tensor loss_scale_1;
};

// One micro-batch: batch * seq token rows, sequence after sequence. Its own targets are the tokens that come next.
struct MicroBatch : Targets {
  BatchShape shape;
  Tensor token_T;      // i32
  Tensor pos_T;        // i32, position for RoPE
  Tensor doc_start_T;  // i32, position in the whole sequence of its first key that a token sees; with documents
  Tensor segment_T;    // i32, non-decreasing, for the sequence balance loss
  // What attention is told of documents in its first T rows: nothing where there are none apart.
  Tensor attention_starts(int64_t T) const { return shape.documents ? doc_start_T.rows(0, T) : Tensor{}; }
  // [num_mtp]: of multi-token prediction at depth k = 1, 2, ... (model/layers/mtp.h): the token k + 1 behind the row's, with
  // weight 0 where that is in another document or behind the sequence. What depth k - 1 is to predict, 0 of which are
  // the targets above, are the tokens that depth k reads: they are tokens of the vocabulary in every row.
  std::vector<Targets> mtp_targets;
  double mtp_coeff = 0.0;  // of the mean loss of each depth
  const Targets& targets(int64_t depth) const {
    return depth == 0 ? *this : mtp_targets[static_cast<size_t>(depth - 1)];
  }
  double total_tokens = 1.0;  // tokens of the global batch
  uint64_t train_step = 0;
  uint64_t first_token = 0;  // global index of row 0 inside the global batch
  Tensor draw_2;             // i64, these two for who draws: a recorded step reads them anew; kept by the engine
  bool training = false;     // jitter, dropping and balance losses are on
};

// Declares the tensors of a micro-batch of this shape; batch must stay where it is until the plan is bound.
void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch);

struct Step {
  Stream& stream;
  StepStack& stack;
  const MicroBatch& batch;

  Tensor alloc(Shape shape, DType dtype) { return stack.alloc(shape, dtype); }
  Tensor alloc_bytes(int64_t num_bytes) { return stack.alloc({num_bytes}, DType::u8); }
};

}  // namespace moebius
