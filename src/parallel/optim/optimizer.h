// AdamW over every trainable parameter, clipped by one global gradient norm; sharded over the ranks that hold the same
// parameters (grad_buckets.h): a rank keeps the f32 masters and moments of what it owns, and no others.
#pragma once

#include <deque>

#include "comm/mesh.h"
#include "config/train_spec.h"
#include "model/params.h"
#include "model/step.h"
#include "parallel/sharding/bucket_exchange.h"

namespace moebius {

// What changes from step to step.
struct OptimizerStepArgs {
  int64_t train_step = 1;  // 1-based
  double lr = 0;
  Tensor schedule_2;  // f64 [lr, train_step] in the device's memory, may be empty: read in their place
};

// How the optimizer's communication is cut and when it runs: neither changes a gradient by a bit.
struct ShardingSpec {
  bool overlap = false;  // behind the passes of the model (bucket_exchange.h)
  int64_t bucket_numel = GradBuckets::kBucketNumel;
};

class Optimizer {
 public:
  // Places params in memory and declares their masters and moments; before the plan is bound.
  Optimizer(const OptimizerSpec& spec, ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
            const ShardingSpec& sharding = {});
  Optimizer(const Optimizer&) = delete;

  // After the last micro-batch: sums gradients over ranks, clips, updates masters and weights. All ranks together.
  // A gradient norm that is not finite changes nothing: the caller looks at grad_norm().
  void step(Stream& s, StepStack& stack, const OptimizerStepArgs& move);
  // Every rank's weights become what their owners have: after masters were loaded and ParamTable::sync().
  void gather(Stream& s) {
    exchange_.weights_changed(s);
    exchange_.settle(s);
  }
  BucketExchange& exchange() { return exchange_; }

  const Tensor& grad_norm() const { return norm_1_; }  // f32 [1], before clipping, the same on every rank
  // Of the elements that this rank owns (param->owned).
  struct Moments {
    const Param* param;
    Tensor m, v;  // f32 [owned.count]
  };
  const std::deque<Moments>& moments() const { return moments_; }
  const GradBuckets& buckets() const { return buckets_; }

 private:
  void measure_norm(Stream& s, StepStack& stack) const;
  void update(Stream& s, const OptimizerStepArgs& move) const;

  OptimizerSpec spec_;
  const Mesh& mesh_;
  GradBuckets buckets_;
  BucketExchange exchange_;
  std::deque<Moments> moments_;
  Tensor sum_squares_1_, norm_1_, scale_1_;
};

}  // namespace moebius
