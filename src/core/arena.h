// The step stack is the only memory that is allocated and freed during a step.
// It allocates last in, first out, from one planned buffer; a scope frees what was allocated
// inside it. On the null device the stack only measures: the high-water mark of a dry run is the
// size to plan.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace moebius {

class StepStack {
 public:
  // The stack uses [base, base + capacity). On the null device it has no memory and no limit.
  StepStack(DeviceKind device, void* base, int64_t capacity)
      : device_(device), base_(static_cast<char*>(base)), capacity_(capacity) {}

  static constexpr int64_t kAlign = 256;  // the alignment that suits a GPU's copy engine and matrix units

  // Returns uninitialised memory, aligned to kAlign bytes.
  // Throws Error{internal} when the planned stack is too small.
  Tensor alloc(Shape shape, DType dtype);

  // Runs body, and keeps all that body allocated until the scope around this call ends, even if scopes inside body
  // have ended. Use it when the work of body may still run while later work is launched (model/side_work.h).
  template <class Body>
  void run_kept(Body&& body) {
    const int64_t outer = peak_;
    peak_ = used_;
    body();
    used_ = peak_;
    peak_ = peak_ > outer ? peak_ : outer;
  }

  int64_t used() const { return used_; }
  int64_t high_water() const { return high_water_; }
  int64_t capacity() const { return capacity_; }
  DeviceKind device() const { return device_; }

 private:
  friend class StackScope;
  DeviceKind device_;
  char* base_;
  int64_t capacity_;
  int64_t used_ = 0;
  int64_t high_water_ = 0;
  int64_t peak_ = 0;  // the maximum of used_ since the body of run_kept() began
};

// Frees everything that was allocated from the stack during its lifetime.
class StackScope {
 public:
  explicit StackScope(StepStack& stack) : stack_(stack), mark_(stack.used_) {}
  ~StackScope() { stack_.used_ = mark_; }
  StackScope(const StackScope&) = delete;

 private:
  StepStack& stack_;
  int64_t mark_;
};

}  // namespace moebius
