// The trainable parameters with the moments that an optimizer keeps of them, in the formats that
// OptimizerSpec names.
#pragma once

#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "core/block_code.h"
#include "ops/optimizer/optimizer.h"
#include "parallel/optim/optimizer.h"

namespace moebius {

class TrainedParams {
 public:
  // Declares `prefixes.size()` moments, 0 to 2, of the owned elements of each trainable parameter.
  // The second one has no sign. Their states are saved under the prefixes, which outlive it. seed: of
  // stochastic rounding. Error{usage} where blocks of 8-bit codes are cut by the layout.
  TrainedParams(const OptimizerContext& context, std::span<const std::string_view> prefixes);

  // The tensors of an update. A parameter with a number that is rounded stochastically is one for
  // each of its parts, whose draws belong to elements of global tensors.
  std::vector<UpdatedTensor> tensors() const;
  std::vector<OptimizerState> state() const;

 private:
  struct Trained {
    const Param* param = nullptr;
    float weight_decay = 0;
    std::array<Tensor, 2> moments;  // [owned.count]
    std::array<Tensor, 2> scales;   // [owned.count / kCodeBlock] where moments are 8-bit codes; else empty
  };

  std::span<const std::string_view> prefixes_;
  uint64_t seed_;
  std::deque<Trained> all_;  // a deque: the plan fills in moments where they are
};

}  // namespace moebius
