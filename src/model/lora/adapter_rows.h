// AdapterRows keep the narrow products of an adapter, scale A x and scale B^T dy, from forward() and backward_input()
// for backward_weight() (model/lora/adapter.h). A layer that keeps them reads x and dy once less each.
#pragma once

#include <string>

#include "memory/wgrad_input.h"
#include "model/lora/adapter.h"

namespace moebius {

class AdapterRows {
 public:
  // rows: of x and dy of a micro-batch. Without targets nothing is declared, and low() and dlow() are empty.
  void declare(MemoryPlan& plan, const std::string& prefix, const Adapter& adapter, int64_t rows, DType dtype) {
    if (adapter.is_empty()) return;
    plan.declare(low_, prefix + "_low", {rows, adapter.low_columns()}, dtype, Life::saved);
    dlow_.declare(plan, prefix + "_dlow", {rows, adapter.low_columns()}, dtype);
  }
  // Called in backward_input, before it computes the gradient of x. has_dx: it does compute it.
  void open(StepStack& stack, bool has_dx) {
    has_dlow_ = has_dx && dlow_.numel() > 0;
    if (has_dlow_) dlow_.open(stack);
  }

  Tensor low(int64_t rows) const { return low_.numel() > 0 ? low_.rows(0, rows) : Tensor{}; }
  Tensor dlow(int64_t rows) const { return has_dlow_ ? dlow_.rows(0, rows) : Tensor{}; }

 private:
  Tensor low_;
  WgradInput dlow_;
  bool has_dlow_ = false;
};

}  // namespace moebius
