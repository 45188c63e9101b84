// A tensor that forward leaves for backward. The plan decides whether it is kept between the two or made again; a layer
// says how it is made, and asks nothing.
#pragma once

#include <string>
#include <utility>

#include "memory/plan.h"

namespace moebius {

class SavedTensor : public Tensor {
 public:
  // what: the name in memory.recompute that covers it.
  void declare(MemoryPlan& plan, std::string name, Shape shape, DType dtype, bool RecomputeSpec::*what) {
    is_remade_ = plan.recompute().*what || plan.recompute().layer;
    if (is_remade_) return plan.declare_remade(*this, shape, dtype);
    plan.declare(*this, std::move(name), shape, dtype, Life::saved);
  }

  // In forward, before it is written. What is not kept stands on the step stack, until the scope ends that is open.
  void open(StepStack& stack) {
    if (is_remade_) Tensor::operator=(stack.alloc(shape, dtype));
  }
  // The same in memory of the caller, of at least this shape.
  void open_in(Tensor room) {
    if (is_remade_) Tensor::operator=(room.view(shape));
  }
  // In backward, before it is read: make() writes it again, with the bits of forward.
  template <class Make>
  void remake(StepStack& stack, Make&& make) {
    if (!is_remade_) return;
    open(stack);
    make();
  }
  bool is_remade() const { return is_remade_; }  // for those that look at what is kept

 private:
  bool is_remade_ = false;
};

}  // namespace moebius
