// The interface of optimizers, which update parameters by their gradients.
//
// An optimizer names its own state, so checkpoints need not know optimizers. It updates the elements that this rank
// owns (Param::owned). A Sharding (parallel/sharding/sharding.h) decides which these are, and moves gradients and
// weights. The gradient norm is computed by GradNorm (parallel/optim/grad_norm.h).
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "config/train_spec.h"
#include "core/block_code.h"
#include "model/params.h"
#include "model/step.h"
#include "parallel/sharding/sharding.h"

namespace moebius {

class StreamedUpdate;

// The arguments that change from step to step.
struct OptimizerStepArgs {
  Tensor scale_1;          // f32 [1], the factor of every gradient (clip_scale() in ops/optimizer)
  int64_t train_step = 1;  // 1-based
  double lr = 0;
  // f64 [lr, train_step] in device memory; if not empty, it is read instead of the two fields above.
  Tensor lr_and_step_2;
};

// One tensor of an optimizer's state. A checkpoint stores each part of the parameter as prefix + part name.
struct OptimizerState {
  std::string_view prefix;  // "adam_m."
  const Param* param = nullptr;
  Tensor values;                          // f32, bf16 or u8 [param->owned.count], in the order of the owned elements
  Tensor scales;                          // f32 [param->owned.count / kCodeBlock] of u8 codes; else empty
  BlockCode code = BlockCode::with_sign;  // code of u8 values, including those that a checkpoint may have instead
};

class Optimizer {
 public:
  Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  // Updates masters and weights of the owned elements. Scratch is on the stack. If the gradient norm is not finite,
  // scale is not finite either, and nothing is changed. REQUIRES: gradients are summed over ranks.
  virtual void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) = 0;
  // Returns the update in parts, which may overlap with other work; null where it is in one piece.
  virtual StreamedUpdate* streamed() { return nullptr; }
  // Returns the state of every trainable parameter of this rank, for checkpoints, in the order of their declaration.
  virtual std::vector<OptimizerState> state() const = 0;
};

// The inputs of an optimizer. The references must outlive it.
struct OptimizerContext {
  const OptimizerSpec& spec;
  const ParamTable& params;
  MemoryPlan& plan;
  uint64_t seed = 0;             // seed of stochastic rounding
  const Mesh* mesh = nullptr;    // read by Muon
  Sharding* sharding = nullptr;  // the same
};

// Makes the optimizer that spec names, and declares its state for the elements that this rank owns. Call it after
// make_sharding(), and before the plan is bound.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerContext& context);

// Returns whether Muon updates the parameter as matrices: its parts are projections of a layer, or matrices of experts.
bool is_of_matrices(const ParamSpec& spec);

// Returns how many tensors of state the optimizer that spec names has for each parameter. of_matrices:
// is_of_matrices().
int64_t num_moments(const OptimizerSpec& spec, bool of_matrices = true);

// The maximum scratch of an update over several parameters.
struct UpdateScratch {
  int64_t matrix = 0;               // elements of the whole matrices that are updated at once
  int64_t newton_schulz_bytes = 0;  // ops/newton_schulz/newton_schulz.h
  void at_least(const UpdateScratch& other);
  int64_t stack_bytes() const;
};
UpdateScratch update_scratch(const OptimizerSpec& spec, const ParamSpec& param);

// The bytes per owned element of a matrix.
double state_bytes(const OptimizerSpec& spec);                   // bytes of all moments and their scales
int64_t master_bytes(const OptimizerSpec& spec, DType weights);  // bytes of the master, for weights of that dtype

// Returns whether a tensor of a checkpoint is the state of some optimizer that Moebius has.
bool is_optimizer_state(std::string_view tensor_name);

}  // namespace moebius
