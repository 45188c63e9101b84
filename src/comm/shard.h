// The part of a tensor that one rank has: a block of a global tensor, or a range of elements.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace moebius {

// The block of a global tensor that a rank holds: [begin, begin + count) of dimension dim, and all
// of the other dimensions. A negative dim stands for the whole tensor.
struct Shard {
  int dim = -1;
  int64_t begin = 0, count = 0;
  bool operator==(const Shard&) const = default;
};
// Returns the r-th of n blocks of dimension dim. Where n does not divide it, some blocks are
// longer by one.
Shard shard_of(const Shape& global, int dim, int64_t r, int64_t n);

// Elements [begin, begin + count) of a tensor, counted in the order of its memory.
struct ElementRange {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
  bool operator==(const ElementRange&) const = default;
};
// Returns the elements that both ranges hold; count is 0 when there are none.
ElementRange common(const ElementRange& a, const ElementRange& b);

}  // namespace moebius
