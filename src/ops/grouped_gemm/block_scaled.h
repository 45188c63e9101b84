// Checks for products of quantised operands on a GPU. The sm_90a kernels compute FP8 elements into bf16 or, for weight
// gradients, f32. Operands have scales of blocks of 128, in E4M3, or one scale for each tensor; then gradients are
// E5M2. No check reads scales; f32 must hold the product of two (docs/design/quantised-products.md).
// Ops run the checks also on a null device that counts for a GPU, so that a run is refused before it begins.
#pragma once

#include "core/quantized.h"

namespace moebius {

// Multiples of columns of operands and of bf16 results, so that rows begin at multiples of 16 bytes, as TMA requires.
inline constexpr int64_t kBlockScaledDepth = 16, kBlockScaledColumns = 8;

// The elements of a with per_tensor scales, for which an op has kernels.
enum class TensorElements { none, e4m3, e5m2, both };

struct BlockScaledOperands {
  const char* a_name;
  const Operand& a;  // row_blocks, or per_tensor
  const char* b_name;
  const Operand& b;  // square_blocks, in a weight gradient too; per_tensor and E4M3 if a is per_tensor
  TensorElements per_tensor = TensorElements::none;
};
// Throws Error{usage} "who on a GPU: name must be ...; got ...; ..." unless a kernel takes them.
void check_block_scaled(const char* who, const BlockScaledOperands& operands);

// The same for a result, or a tensor like it: bf16, columns in multiples of this.
void check_block_scaled_result(const char* who, const char* name, const Tensor& t,
                               int64_t columns = kBlockScaledColumns);

// Returns the multiple for the inner columns of gated layers, whose gate and up have blocks of their own.
constexpr int64_t gated_columns(ScaleLayout layout) {
  return layout == ScaleLayout::per_tensor ? kBlockScaledColumns : kGroupAlign;
}

}  // namespace moebius
