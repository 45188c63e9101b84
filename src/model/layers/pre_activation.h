// The pre-activations of a gated layer: forward saves them for backward, which recomputes the activation from them.
//
// With precision.activations = "recipe" they are saved in 8 bits, with a scale for each 128 elements of a row
// (ops/quantize/quantized_rows.h). Forward computes with the unrounded values, which are on the step stack.
// Backward computes with the rounded ones, even if it has recomputed them, so that recompute changes no bit.
#pragma once

#include <string>
#include <utility>

#include "memory/saved_tensor.h"
#include "model/layer_context.h"

namespace moebius {

// Returns the elements of a packed row in the dtype of the computation, in which such rows are stored and copied.
// Throws Error{usage} if they would have no fewer bytes.
int64_t packed_columns(int64_t columns, DType dtype);
// Returns such rows as bytes, as ops expect them.
Tensor packed_bytes(const Tensor& packed_RW);

class PreActivation {
 public:
  // what: the name in memory.recompute and memory.offload that covers it.
  // offsets, below: empty, or as in PackQuantizedRows, so that other rows are neither read nor written.
  void declare(MemoryPlan& plan, const std::string& name, Shape shape, DType dtype, bool RecomputeSpec::*what,
               bool in_8_bits);
  // The caller provides the memory (open_in), and rounds the rows itself.
  void declare_in_place(Shape shape, DType dtype) { numbers_.declare_in_place(shape, dtype); }

  // Forward: open, before it is written; save, once it is.
  void open(StepStack& stack) { numbers_.open(stack); }
  void open_in(const Tensor& buffer) { numbers_.open_in(buffer); }
  void save(Step& step, int64_t num_rows, const Tensor& offsets_e1) const;
  Tensor rows(int64_t begin, int64_t end) const { return numbers_.rows(begin, end); }
  const Tensor& numbers() const { return numbers_; }

  // Backward: recompute, then one of the two that follow.
  template <class Compute>
  void recompute(StepStack& stack, Compute&& compute) {
    if (!is_saved_in_8_bits()) numbers_.recompute(stack, std::forward<Compute>(compute));
  }
  // Returns the first rows as backward reads them; on the step stack if they are in 8 bits.
  Tensor for_backward(Step& step, int64_t num_rows, const Tensor& offsets_e1) const;
  // Returns the same in 8 bits, as bytes. REQUIRES: in_8_bits().
  Tensor packed_for_backward(Step& step, int64_t num_rows, const Tensor& offsets_e1) const;

  bool in_8_bits() const { return in_8_bits_; }
  bool is_recomputed() const { return numbers_.is_recomputed() && !is_saved_in_8_bits(); }
  int64_t columns() const { return numbers_.dim(1); }
  // Returns the tensor for diagnosis; empty if it is not kept on the device unpacked.
  Tensor kept() const { return numbers_.kept(); }

 private:
  bool is_saved_in_8_bits() const { return in_8_bits_ && !packed_.empty(); }

  bool in_8_bits_ = false;
  SavedTensor numbers_;
  SavedTensor packed_;  // empty unless forward saves rows in 8 bits
};

// Returns whether a layer saves its pre-activations in 8 bits. is_quantised: all of its products are.
inline bool saves_in_8_bits(const LayerContext& c, bool is_quantised) {
  return is_quantised && c.params.use() == ModelUse::training && c.precision.recipe == PrecisionRecipe::fp8_block &&
         c.precision.activations == PrecisionChoice::recipe;
}

}  // namespace moebius
