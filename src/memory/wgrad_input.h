// A WgradInput is a tensor that backward_input leaves for backward_weight: an input of a weight gradient.
// MemoryPlan::split_backward decides where it is stored between the two passes. If backward_weight follows at once, it
// is on the step stack, or a view of a tensor that still exists. If other passes may come between, it has memory of its
// own. The code of a layer is the same in both cases.
#pragma once

#include <string>
#include <utility>

#include "memory/plan.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {

class WgradInput : public Tensor {
 public:
  // whole: the shape for a whole micro-batch; backward passes never run on parts of one.
  void declare(MemoryPlan& plan, std::string name, Shape whole, DType dtype_of_it) {
    is_kept_ = plan.splits_backward();
    if (is_kept_) return plan.declare(*this, std::move(name), whole, dtype_of_it, Life::saved);
    Tensor::operator=({.shape = whole, .dtype = dtype_of_it, .device = DeviceKind::null});
  }

  // Called in backward_input, before the tensor is written.
  void open(StepStack& stack) {
    if (!is_kept_) Tensor::operator=(stack.alloc(shape, dtype));
  }
  // The same in memory of the caller, with at least this tensor's elements.
  void open_in(const Tensor& buffer) {
    if (!is_kept_) Tensor::operator=(buffer.view(shape));
  }
  // Called in backward_input with an existing tensor of this size. Keeps a copy if the tensor is kept, else a view.
  void hold(Stream& s, const Tensor& t) {
    if (is_kept_)
      copy(s, view(t.shape), t);
    else
      Tensor::operator=(t);
  }

  bool is_kept() const { return is_kept_; }  // whether it has memory of its own, to which hold() copies

 private:
  bool is_kept_ = false;
};

}  // namespace moebius
