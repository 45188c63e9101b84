// An operand of a product: a tensor, and the scales of its elements where it is quantised.
#pragma once

#include <string_view>

#include "core/tensor.h"

namespace moebius {

// The elements that share a scale. The size of a block is that of the data divided by that
// of the scales.
enum class ScaleLayout : uint8_t {
  none,           // there are no scales
  per_tensor,     // all elements share one
  row_blocks,     // consecutive elements of a row share one
  square_blocks,  // a block of rows and columns shares one
};

std::string_view name_of(ScaleLayout layout);

// The value of an element is data times its scale, or data alone where scales is empty. A plain
// tensor is an operand without scales, so callers that do not quantise pass a Tensor.
struct Operand {
  Operand() = default;
  Operand(Tensor data) : data(data) {}  // not explicit: see above
  Operand(Tensor data, Tensor scales, ScaleLayout layout) : data(data), scales(scales), layout(layout) {}

  bool is_plain() const { return scales.empty() && layout == ScaleLayout::none; }

  Tensor data;
  Tensor scales;
  ScaleLayout layout = ScaleLayout::none;
};

std::string to_string(const Operand& operand);  // "f8_e4m3[4, 8] with row_blocks scales f32[4, 1]"

// Throws Error{usage} "who: name has no quantised form yet; ..." unless the operand is plain.
// Ops that compute only with plain tensors call it.
void check_plain(const char* who, const char* name, const Operand& operand);

}  // namespace moebius
