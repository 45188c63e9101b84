// The argument of every pass of a layer: a stream to run on, a stack for scratch, and the
// micro-batch. It must not grow.
#pragma once

#include <string>
#include <vector>

#include "config/parallel_spec.h"
#include "core/arena.h"
#include "device/device.h"
#include "memory/plan.h"

namespace moebius {

// The sizes that a model is planned for. They are those of the part of a micro-batch that the tp
// ranks of one place hold together (model/attention/token_runs.h).
struct BatchShape {
  int64_t batch = 1;  // sequences
  int64_t seq = 1;    // tokens per sequence on this rank: 1 / cp of it
  // Scopes of the sequence balance loss: sequences, or documents when they are kept apart.
  int64_t max_segments = 1;
  // True: sequences hold documents that do not see each other, with their starts in doc_start_T.
  // False: a token sees all tokens before it.
  bool documents = true;
  CpComm cp_comm = CpComm::allgather, cp_comm_window = CpComm::allgather;  // of layers without and with a window
  // The depths of multi-token prediction that the batch has targets for: all of the model's, or 0.
  // With 0 the modules are held but not computed.
  int64_t num_mtp = 0;
  int64_t tokens() const { return batch * seq; }
};

// The scalars of a training step, as plain data. The host fills them with a micro-batch. They are
// copied whole into the memory of the batch. Ops read them there alone, so that a captured step
// reads them anew at each replay.
struct StepScalars {
  static constexpr int64_t kMaxDepths = 16;  // of a model: the next token, and multi-token prediction

  // [depth]: 1 / the sum of the target weights of this depth in the global batch, 0 where that is 0.
  // Depth 0 is the next token.
  double loss_scale[kMaxDepths] = {1.0};
  // [depth]: the factor of the weighted losses in the objective. It is loss_scale, times
  // the coefficient of multi-token prediction at its depths.
  float objective_scale[kMaxDepths] = {1.0f};
  // For what is drawn: the step, and the index of row 0 in the global batch's tokens.
  int64_t draw[2] = {};
  double lr_and_step[2] = {};  // for the optimizer, in its dtype: the learning rate, and the step
  double total_tokens = 1.0;   // of the global batch

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

// One micro-batch: batch * seq token rows, sequence after sequence. Its own targets are the next tokens.
struct MicroBatch : Targets {
  BatchShape shape;
  // The neighbours of cp that share its sequences, a power of two (MeshShape::cp_dynamic). 0: all of cp.
  int64_t cp = 0;
  Tensor token_T;      // i32
  Tensor pos_T;        // i32, position for RoPE
  Tensor doc_start_T;  // i32, position in the whole sequence of its first key that a token sees; with documents
  // i32. In training: non-decreasing, for the sequence balance loss. In generation: the sequence of
  // the cache that the row is the next token of.
  Tensor segment_T;
  // Document starts of the first T rows for attention; empty if documents are not separated.
  Tensor attention_starts(int64_t T) const { return shape.documents ? doc_start_T.rows(0, T) : Tensor{}; }
  // [num_mtp]: the targets at depth k = 1, 2, ... of multi-token prediction (model/layers/mtp.h).
  // The target is token k + 1 after the row's. Its weight is 0 where that token is in another
  // document or after the end of the sequence. Depth k reads the targets of depth k - 1 as its
  // tokens, so they are tokens of the vocabulary in every row.
  std::vector<Targets> mtp_targets;
  const Targets& targets(int64_t depth) const {
    return depth == 0 ? *this : mtp_targets[static_cast<size_t>(depth - 1)];
  }
  bool training = false;  // jitter, dropping and balance losses are on
  // The first of its step: products store the gradients of their weights instead of adding to them
  // (ParamSpec::grad_stored_first).
  bool first_of_step = false;
  // A part of a micro-batch after its first: products add to the gradients that the first has stored.
  bool later_part = false;

  StepScalars scalars;         // on the host, also of a batch in a device's memory
  Tensor scalars_memory;       // u8: the same where ops read them
  void store_scalars() const;  // REQUIRES host memory. Copies scalars there.
  // Views of scalars_memory: f32 [1]; i64 [2]; f64 [2]; f64 [1].
  Tensor objective_scale_1(int64_t depth) const;
  Tensor draw_2() const;
  Tensor lr_and_step_2() const;
  Tensor total_tokens_1() const;
};

// Every tensor of a batch of this shape, with what the plan needs to know about it.
// This is the only list of them.
struct BatchTensor {
  Tensor* tensor;
  std::string name;
  Shape shape;
  DType dtype;
};
std::vector<BatchTensor> tensors_of(MicroBatch& batch, const BatchShape& shape);

// Declares the tensors of a micro-batch of this shape; batch must stay where it is until the plan
// is bound. Error{usage} when the shape has more depths than StepScalars.
void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch);

struct Step {
  Stream& stream;
  StepStack& stack;
  const MicroBatch& batch;

  Tensor alloc(Shape shape, DType dtype) { return stack.alloc(shape, dtype); }
  Tensor alloc_bytes(int64_t num_bytes) { return stack.alloc({num_bytes}, DType::u8); }
};

}  // namespace moebius
