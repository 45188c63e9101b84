// A SavedTensor is a tensor that forward saves for backward. The recipe decides whether it is kept in device memory,
// kept on the host, or recomputed (memory.offload, memory.recompute); the plan has these settings. The code of a layer
// is the same in all three cases: it only says how the tensor is computed.
#pragma once

#include <string>
#include <utility>

#include "memory/plan.h"

namespace moebius {

class SavedTensor : public Tensor {
 public:
  // what: the name in memory.recompute and memory.offload that covers it.
  void declare(MemoryPlan& plan, std::string name, Shape shape, DType dtype, bool RecomputeSpec::*what) {
    is_recomputed_ = plan.recompute().covers(what);
    if (is_recomputed_) return plan.declare_recomputed(*this, shape, dtype);
    declare_kept(plan, std::move(name), shape, dtype, plan.offloads(what));
  }
  // Declares the residual stream before a layer, which is never recomputed.
  void declare_layer_input(MemoryPlan& plan, std::string name, Shape shape, DType dtype) {
    declare_kept(plan, std::move(name), shape, dtype, plan.offloads_layer_input());
  }

  // Declares a tensor of this shape whose memory the caller provides, with open_in().
  void declare_in_place(Shape shape_of_it, DType dtype_of_it) {
    is_recomputed_ = true;
    Tensor::operator=({.shape = shape_of_it, .dtype = dtype_of_it, .device = DeviceKind::null});
  }

  // Called in forward, before the tensor is written. A tensor that will be recomputed is allocated on the step stack,
  // in the current scope.
  void open(StepStack& stack) {
    if (is_recomputed_) Tensor::operator=(stack.alloc(shape, dtype));
  }
  // The same, but in the caller's buffer, which has at least this tensor's elements.
  void open_in(Tensor buffer) {
    if (is_recomputed_) Tensor::operator=(buffer.view(shape));
  }
  // Called in a backward pass, before the tensor is read. If it was not kept, compute() writes it again, with the same
  // bits as in forward.
  template <class Compute>
  void recompute(StepStack& stack, Compute&& compute) {
    if (!is_recomputed_) return;
    open(stack);
    compute();
  }
  bool is_recomputed() const { return is_recomputed_; }
  // Returns the tensor for diagnosis; empty if it is not kept on the device.
  Tensor kept() const { return is_recomputed_ || is_offloaded_ ? Tensor{} : Tensor(*this); }

 private:
  void declare_kept(MemoryPlan& plan, std::string name, Shape shape, DType dtype, bool offloaded) {
    is_offloaded_ = offloaded;
    if (offloaded) return plan.declare_offloaded(*this, std::move(name), shape, dtype);
    plan.declare(*this, std::move(name), shape, dtype, Life::saved);
  }

  bool is_recomputed_ = false, is_offloaded_ = false;
};

// A tensor of the last forward pass and its name in diagnosis. It is empty when it was not kept.
struct KeptTensor {
  std::string name;
  Tensor tensor;
};

}  // namespace moebius
