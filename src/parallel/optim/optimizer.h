// The interface of optimizers, which update parameters by their gradients.
//
// An optimizer owns the names of its state; a checkpoint asks for them and knows no names itself.
// It also owns the placement of parameters in memory, and the communication of gradients and
// weights.
// It is sharded over the ranks that hold the same parameters (parallel/sharding/grad_buckets.h). A
// rank keeps the f32 masters and the state of the elements that it owns, and no others.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "comm/mesh.h"
#include "config/train_spec.h"
#include "model/params.h"
#include "model/step.h"
#include "parallel/sharding/bucket_exchange.h"

namespace moebius {

// The arguments that change from step to step.
struct OptimizerStepArgs {
  int64_t train_step = 1;  // 1-based
  double lr = 0;
  // f64 [lr, train_step] in the device's memory; may be empty. It is read instead of the two above.
  Tensor schedule_2;
};

// How the optimizer's communication is cut into buckets, and when it runs. Neither changes
// gradients, bit for bit.
struct ShardingSpec {
  bool overlap = false;  // overlapped with the passes of the model (bucket_exchange.h)
  int64_t bucket_numel = GradBuckets::kBucketNumel;
};

// One tensor of an optimizer's state. A checkpoint stores each part of the parameter as prefix + part name.
struct OptimizerState {
  std::string_view prefix;  // "adam_m."
  const Param* param = nullptr;
  Tensor tensor;  // f32 [param->owned.count], in the order of the owned elements
};

class Optimizer {
 public:
  Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  // Called after the last micro-batch, by all ranks together. Sums gradients over ranks, clips
  // them, and updates masters and weights. If the gradient norm is not finite, nothing is changed;
  // the caller checks grad_norm().
  virtual void step(Stream& s, StepStack& stack, const OptimizerStepArgs& args) = 0;
  // Gives every rank the weights of their owners. It is called after masters were loaded and after
  // ParamTable::sync(), by all ranks together.
  virtual void gather(Stream& s) = 0;

  virtual const Tensor& grad_norm() const = 0;  // f32 [1], before clipping, the same on every rank
  // The state that a checkpoint saves, for every trainable parameter of this rank in the order of
  // declaration.
  virtual std::vector<OptimizerState> state() const = 0;
  virtual BucketExchange& exchange() = 0;
};

// The optimizer that spec names. Places params in memory and declares their masters
// and its state: call it before the plan is bound. The references outlive it.
// Error{usage} for a name that is not known.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerSpec& spec, ParamTable& params, const Mesh& mesh,
                                          MemoryPlan& plan, const ShardingSpec& sharding = {});

// Returns whether a tensor of a checkpoint is the state of some optimizer that Moebius has.
bool is_optimizer_state(std::string_view tensor_name);

}  // namespace moebius
