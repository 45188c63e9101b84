// Step is the argument of every pass of a layer: the stream to run on, the step stack for scratch, and the micro-batch.
// It must not grow.
#pragma once

#include <string>
#include <vector>

#include "config/parallel_spec.h"
#include "core/arena.h"
#include "device/device.h"
#include "memory/plan.h"

namespace moebius {

// The sizes that a model is planned for: those of the part of a micro-batch that the tp ranks with one cp coordinate
// hold together (model/attention/token_runs.h).
struct BatchShape {
  int64_t batch = 1;  // sequences
  int64_t seq = 1;    // tokens per sequence on this rank: 1 / cp of it
  // The maximum number of segments of the sequence balance loss: of sequences, or of documents with `documents`.
  int64_t max_segments = 1;
  // True: sequences consist of documents, which begin at doc_start_T, and attention does not cross documents.
  // False: a token attends to all earlier tokens of its sequence.
  bool documents = true;
  CpComm cp_comm = CpComm::allgather, cp_comm_window = CpComm::allgather;  // method without and with a window
  // The number of multi-token prediction depths that the batch has targets for: all of the model's, or 0. With 0 the
  // modules have parameters but are not computed.
  int64_t num_mtp = 0;
  int64_t tokens() const { return batch * seq; }
};

// The scalars of a training step, as plain data. The host fills them in with each micro-batch, and the struct is copied
// as a whole into the memory of the batch. Ops read only that copy, so each replay of a graph reads new values.
struct StepScalars {
  static constexpr int64_t kMaxDepths = 16;  // depths of a model: the next token, and multi-token prediction

  // [depth]: 1 / (the sum of the target weights of this depth in the global batch), or 0 if that sum is 0. Depth 0 is
  // the next token.
  double loss_scale[kMaxDepths] = {1.0};
  // [depth]: the factor of the weighted losses in the objective: loss_scale, at depths above 0 times the coefficient of
  // multi-token prediction.
  float objective_scale[kMaxDepths] = {1.0f};
  // The counters of random draws: the step, and the index of row 0 among the tokens of the global batch.
  int64_t draw[2] = {};
  double lr_and_step[2] = {};  // the learning rate and the step, which the optimizer reads
  double total_tokens = 1.0;   // tokens of the global batch

  void set_loss_scale(int64_t depth, double scale, double coeff = 1.0) {
    loss_scale[depth] = scale;
    objective_scale[depth] = static_cast<float>(coeff * scale);
  }
  void set_step(int64_t step) {
    draw[0] = step;
    lr_and_step[1] = static_cast<double>(step);
  }
  void set_first_token(int64_t index) { draw[1] = index; }
  void set_lr(double lr) { lr_and_step[0] = lr; }
  int64_t step() const { return draw[0]; }
  double lr() const { return lr_and_step[0]; }
};

// The targets of a head: the token to predict at each row.
struct Targets {
  Tensor target_T;  // i32
  Tensor weight_T;  // f32, the weight of each target in the loss
};

// One micro-batch: batch * seq rows, one per token, sequence after sequence. The inherited targets are the next tokens.
struct MicroBatch : Targets {
  BatchShape shape;
  // The number of consecutive cp ranks that share its sequences, a power of two (MeshShape::cp_dynamic). 0: all of cp.
  int64_t cp = 0;
  Tensor token_T;      // i32
  Tensor pos_T;        // i32, position for RoPE
  Tensor doc_start_T;  // i32, position in the whole sequence of the first key that a token attends to; with documents
  // i32. In training: the segment of each row for the sequence balance loss, non-decreasing. In generation: the cached
  // sequence whose next token the row is.
  Tensor segment_T;
  // Returns the document starts of the first T rows for attention; empty if documents are not separated.
  Tensor attention_starts(int64_t T) const { return shape.documents ? doc_start_T.rows(0, T) : Tensor{}; }
  // [num_mtp]: the targets at depth k = 1, 2, ... of multi-token prediction (model/layers/mtp.h). The target of row i
  // is token i + k + 1. Its weight is 0 if that token is in another document or after the end of the sequence. Depth k
  // reads the targets of depth k - 1 as its tokens, so every target is in the vocabulary.
  std::vector<Targets> mtp_targets;
  const Targets& targets(int64_t depth) const {
    return depth == 0 ? *this : mtp_targets[static_cast<size_t>(depth - 1)];
  }
  bool training = false;  // true: jitter, dropping and balance losses are on
  // True for the first micro-batch of a step: products store the gradients of their weights instead of adding to them
  // (ParamSpec::grad_stored_first).
  bool first_of_step = false;
  // The first row of a chunk, among the rows of this rank's residual stream. In chunks after the first, products add to
  // the gradients that the first chunk stored.
  int64_t first_row = 0;
  // True in backward passes, which may compute products of the forward pass once more.
  bool backward = false;

  StepScalars scalars;         // kept in host memory on every device
  Tensor scalars_memory;       // u8: the copy that ops read
  void store_scalars() const;  // copies scalars to scalars_memory. REQUIRES: that is host memory
  // Views of scalars_memory: f32 [1]; i64 [2]; f64 [2]; f64 [1].
  Tensor objective_scale_1(int64_t depth) const;
  Tensor draw_2() const;
  Tensor lr_and_step_2() const;
  Tensor total_tokens_1() const;
};

// A tensor of a micro-batch, with its declaration.
struct BatchTensor {
  Tensor* tensor;
  std::string name;
  Shape shape;
  DType dtype;
};
// Returns all tensors of a batch of this shape. This is the only list of them.
std::vector<BatchTensor> tensors_of(MicroBatch& batch, const BatchShape& shape);

// Declares the tensors of a micro-batch of this shape; batch must stay where it is until the plan
// is bound. Throws Error{usage} when the shape has more depths than StepScalars.
void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch);

struct Step {
  Stream& stream;
  StepStack& stack;
  const MicroBatch& batch;

  Tensor alloc(Shape shape, DType dtype) { return stack.alloc(shape, dtype); }
  Tensor alloc_bytes(int64_t num_bytes) { return stack.alloc({num_bytes}, DType::u8); }
};

}  // namespace moebius
