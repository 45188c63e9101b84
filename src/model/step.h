// What every layer gets: where to run, scratch, and the micro-batch. It must not grow.
#pragma once

#include "comm/layout.h"
#include "core/arena.h"
#include "core/device.h"
#include "memory/plan.h"

namespace moebius {

// Which tokens of a micro-batch stand on this rank, and the sizes that a model is planned for.
//
// Context parallelism cuts each sequence into 2 cp chunks, and rank r of cp has chunks r and 2 cp - 1 - r: so all ranks
// have the same part of a causal triangle. Its rows are those of its sequences in order, in each the first chunk and
// then the second. The tp ranks that share these rows all have the micro-batch's tensors of all of them; of the
// residual stream rank r of tp has the r-th of tp equal blocks of rows (sequence parallelism, arXiv 2205.05198).
struct BatchShape {
  int64_t batch = 1;  // sequences
  int64_t seq = 1;    // tokens a sequence
  int64_t max_segments =
      1;  // scopes of the sequence balance loss in it: sequences, or documents when they are kept apart
  // Sequences hold documents that do not see each other, where doc_start_T says; else a token sees all before it.
  bool documents = true;
  int64_t tp = 1, tp_rank = 0, cp = 1, cp_rank = 0;

  int64_t rows() const { return batch * seq / cp; }  // of a micro-batch here: what the tp ranks have together
  int64_t tokens() const { return rows() / tp; }     // rows of the residual stream on this rank
  int64_t chunk() const { return cp == 1 ? seq : seq / (2 * cp); }  // rows of a sequence that follow each other
  // Where a row of the micro-batch stands in its sequence, and among all tokens of the micro-batch over cp.
  int64_t position_of(int64_t row) const;
  int64_t token_of(int64_t row) const { return row / (seq / cp) * seq + position_of(row); }
};

// The share of one rank. Error{usage} with the equation that fails: 2 cp must divide seq, and tp the rows.
BatchShape share_of(BatchShape whole, const MeshShape& mesh, const RankPlace& place);

// One micro-batch: shape.rows() token rows, sequence after sequence. A model without tp and cp has all of it.
struct MicroBatch {
  BatchShape shape;
  Tensor token_T, target_T;  // i32
  Tensor weight_T;           // f32, of each target in the loss
  Tensor pos_T;              // i32, position for RoPE
  Tensor doc_start_T;        // i32, position of the first key of its sequence that a token sees; with shape.documents
  Tensor segment_T;          // i32, non-decreasing, for the sequence balance loss
  // The rows of one of these that stand in this rank's residual stream.
  Tensor own(const Tensor& x_T) const {
    return shape.tp == 1 ? x_T : x_T.rows(shape.tp_rank * shape.tokens(), (shape.tp_rank + 1) * shape.tokens());
  }
  // What attention is told of documents in its first T rows: nothing where there are none apart.
  Tensor attention_starts(int64_t T) const { return shape.documents ? doc_start_T.rows(0, T) : Tensor{}; }
  double loss_scale = 1.0;    // 1 / sum of the target weights of the global batch
  Tensor loss_scale_1;        // f32 [1], the same where a recorded step reads it anew; kept by the engine
  double total_tokens = 1.0;  // tokens of the global batch
  uint64_t train_step = 0;
  uint64_t first_token = 0;  // index inside the global batch of the first token of this micro-batch, over tp and cp
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
