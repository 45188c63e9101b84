// The trainable parameters with their optimizer moments, in the formats of OptimizerSpec.
#pragma once

#include <deque>
#include <functional>
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
  // The second one has no sign. Moments are saved under the prefixes, which must outlive this. seed: seed of
  // stochastic rounding. Throws Error{usage} if the layout would cut blocks of 8-bit codes.
  // of: selects the parameters; empty: all.
  TrainedParams(const OptimizerContext& context, std::span<const std::string_view> prefixes,
                const std::function<bool(const ParamSpec&)>& of = {});

  // Returns the tensors of an update. A parameter of which any value (weight, master or moment) is rounded
  // stochastically gives one tensor for each of its parts, since draws are indexed by the elements of global tensors.
  std::vector<UpdatedTensor> tensors() const;
  // The same for each part of each parameter, those without an element of this rank left out.
  struct OfPart {
    const Param* param = nullptr;
    const ParamPart* part = nullptr;
    ElementRange owned;  // the elements of the part that this rank owns
    UpdatedTensor tensor;
  };
  std::vector<OfPart> parts() const;
  // tensors() of each parameter, in the order of their declaration.
  struct OfParam {
    const Param* param = nullptr;
    std::vector<UpdatedTensor> tensors;
  };
  std::vector<OfParam> of_params() const;
  bool empty() const { return all_.empty(); }
  std::vector<OptimizerState> state() const;

 private:
  struct Trained {
    const Param* param = nullptr;
    float weight_decay = 0;
    std::array<Tensor, 2> moments;  // [owned.count]
    std::array<Tensor, 2> scales;   // [owned.count / kCodeBlock] where moments are 8-bit codes; else empty
  };

  UpdatedTensor whole(const Trained& each) const;
  void add_parts(std::vector<OfPart>& parts, const Trained& each) const;
  std::vector<UpdatedTensor> tensors_of(const Trained& each) const;

  std::span<const std::string_view> prefixes_;
  uint64_t seed_;
  std::deque<Trained> all_;  // a deque: the plan holds the addresses of moments
};

// Returns the elements [begin, end) of all tensors of an update. REQUIRES: begin is a multiple of kCodeBlock.
UpdatedTensor rows_of(UpdatedTensor all, int64_t begin, int64_t end);

}  // namespace moebius
