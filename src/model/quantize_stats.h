// Statistics of quantisation for log.precision: how the operands of the products of each layer were rounded.
#pragma once

#include <deque>
#include <string>

#include "memory/plan.h"

namespace moebius {

class QuantizeStats {
 public:
  // The sums of the step so far, on this rank: those of Quantize::stats_5 (ops/quantize/quantize.h).
  struct Layer {
    int64_t layer = 0;
    Tensor sums_5;  // f64
  };

  explicit QuantizeStats(MemoryPlan& plan) : plan_(plan) {}  // which outlives it
  QuantizeStats(const QuantizeStats&) = delete;

  // The layer of a parameter "model.layers.3.*", which the first call declares in Life::metrics. Null for
  // other parameters.
  const Tensor* of(const std::string& param);
  const std::deque<Layer>& layers() const { return layers_; }
  void clear(Stream& s) const;

 private:
  MemoryPlan& plan_;
  std::deque<Layer> layers_;  // a deque: layers and the plan refer to them
};

}  // namespace moebius
