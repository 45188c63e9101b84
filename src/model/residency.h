// The interface by which passes report when the weights of a parameter must be on this rank, and when its gradient is
// complete. An implementation moves weights and gradients between ranks, or between memories.
//
// The valid order, for each parameter:
//
//   forward pass    [gather]  ready  (its weights are read)                              release
//   backward pass   [gather]  ready  [begin_gradient]  (its weights are read, its gradient is added to)
//                   grad_ready  release
//
// Layers have begin_gradient in each backward pass. Other parameters do not, since several parts of a pass may add to
// their gradients.
//
// Two parts of a pass may use one parameter, such as an embedding that is also the head. So uses may nest: the weights
// may be freed when each ready() has had its release(). A parameter is neither read nor added to outside of its uses.
// Results do not depend on the implementation.
#pragma once

#include <cstddef>
#include <vector>

#include "device/device.h"

namespace moebius {

// Params [begin, end) of a table, in the order they were declared.
struct ParamSpan {
  size_t begin = 0, end = 0;
};

class ParamResidency {
 public:
  virtual ~ParamResidency() = default;
  // The pass will need these weights soon, so their transfer may start now. This is a hint and may
  // be omitted.
  virtual void gather(Stream& s, const ParamSpan& span) = 0;
  // Returns when the weights are on this rank for all work that s gets from now on.
  virtual void ready(Stream& s, const ParamSpan& span) = 0;
  // The pass does not read these weights again before the next ready.
  virtual void release(Stream& s, const ParamSpan& span) = 0;
  // The backward pass of one micro-batch will add to these gradients, which are all gradients of a layer.
  // first_of_step: nothing was added to them in this step yet.
  virtual void begin_gradient(Stream& s, const ParamSpan& span, bool first_of_step) = 0;
  // The backward pass of one micro-batch has added all of its share to these gradients.
  virtual void grad_ready(Stream& s, const ParamSpan& span) = 0;
};

// Checks the order above. A call out of order is an error of the pass: Error{internal}.
class ResidencyOrder {
 public:
  void ready(const ParamSpan& span);
  void begin_gradient(const ParamSpan& span) const;
  void grad_ready(const ParamSpan& span) const;
  void release(const ParamSpan& span);
  bool is_idle() const;  // no parameter is in use: true between passes

 private:
  bool are_in_use(const ParamSpan& span) const;
  std::vector<int> uses_;  // indexed by parameter, up to the last that was used
};

}  // namespace moebius
