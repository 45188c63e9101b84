// What every layer gets: where to run, scratch, and the micro-batch. It must not grow.
#pragma once

#include "config/parallel_spec.h"
#include "core/arena.h"
#include "core/device.h"
#include "memory/plan.h"

namespace moebius {

// The sizes that a model is planned for: of the part of a micro-batch that the tp ranks of one place have together
// (model/token_runs.h).
struct BatchShape {
  int64_t batch = 1;  // sequences
  int64_t seq = 1;    // tokens a sequence here: 1 / cp of it
  int64_t max_segments =
      1;  // scopes of the sequence balance loss in it: sequences, or documents when they are kept apart
  // Sequences hold documents that do not see each other, where doc_start_T says; else a token sees all before it.
  bool documents = true;
  CpComm cp_comm = CpComm::allgather;
  int64_t tokens() const { return batch * seq; }
};

// One micro-batch: batch * seq token rows, sequence after sequence.
struct MicroBatch {
  BatchShape shape;
  Tensor token_T, target_T;  // i32
  Tensor weight_T;           // f32, of each target in the loss
  Tensor pos_T;              // i32, position for RoPE
  Tensor doc_start_T;        // i32, position in the whole sequence of its first key that a token sees; with documents
  Tensor segment_T;          // i32, non-decreasing, for the sequence balance loss
  // What attention is told of documents in its first T rows: nothing where there are none apart.
  Tensor attention_starts(int64_t T) const { return shape.documents ? doc_start_T.rows(0, T) : Tensor{}; }
  double loss_scale = 1.0;    // 1 / sum of the target weights of the global batch
  Tensor loss_scale_1;        // f32 [1], the same where a recorded step reads it anew; kept by the engine
  double total_tokens = 1.0;  // tokens of the global batch
  uint64_t train_step = 0;
  uint64_t first_token = 0;  // global index of row 0 inside the global batch
  bool training = false;     // jitter, dropping and balance losses are on
};

// Declares the tensors of a micro-batch of this shape; batch must stay where it is until the plan is bound.
void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch);

struct Step {
  Stream& stream;
  StepStack& stack;
  const MicroBatch& batch;

  Tensor take(Shape shape, DType dtype) { return stack.take(shape, dtype); }
  Tensor take_bytes(int64_t num_bytes) { return stack.take({num_bytes}, DType::u8); }
};

}  // namespace moebius
