// QK-clip after an update (ops/qk_clip/qk_clip.h), by the largest logits of a step.
#pragma once

#include "model/attention/max_logits.h"
#include "parallel/optim/trained_params.h"

namespace moebius {

class QkClipping {
 public:
  // context: as for make_optimizer(), with a mesh. Declares nothing.
  QkClipping(const OptimizerContext& context, const MaxLogits& logits);

  // Combines the logits of all micro-batches of a step, on each rank for its own heads, and scales the owned elements
  // of masters and weights. Called after Optimizer::update(), with the same arguments, on all ranks together. Scratch
  // is on the stack: the logits of all ranks of dp_cp.
  void update(Stream& s, StepStack& stack, const OptimizerStepArgs& args);

 private:
  float threshold_;
  const MaxLogits& logits_;
  Group& dp_cp_;
  TrainedParams params_;
};

}  // namespace moebius
