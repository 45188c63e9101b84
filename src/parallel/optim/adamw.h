// AdamW (arXiv 1711.05101) over every trainable parameter. The gradients are clipped by one global
// norm. The state is two moments per parameter: the running means of the gradient and of its
// square.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "parallel/optim/grad_norm.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/param_groups.h"

namespace moebius {

class AdamWOptimizer final : public Optimizer {
 public:
  static constexpr std::array<std::string_view, 2> kStatePrefixes{"adam_m.", "adam_v."};

  // Arguments and errors are those of make_optimizer().
  AdamWOptimizer(const OptimizerSpec& spec, ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
                 const ShardingSpec& sharding = {});

  void step(Stream& s, StepStack& stack, const OptimizerStepArgs& args) override;
  void gather(Stream& s) override;
  const Tensor& grad_norm() const override { return norm_.norm(); }
  std::vector<OptimizerState> state() const override;
  BucketExchange& exchange() override { return exchange_; }

 private:
  struct Moments {
    const Param* param;
    double weight_decay;
    Tensor m, v;  // f32 [owned.count]
  };
  void update(Stream& s, const OptimizerStepArgs& args) const;

  OptimizerSpec spec_;
  GradBuckets buckets_;
  BucketExchange exchange_;
  GradNorm norm_;
  std::vector<const Param*> trained_;
  std::deque<Moments> moments_;  // a deque: the plan fills in m and v where they are
};

}  // namespace moebius
