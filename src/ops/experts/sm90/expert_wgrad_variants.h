// Variants of the kernel for weight gradients of E4M3 operands, for benchmarks and tests. All have the same bits.
#pragma once

#include "ops/experts/cuda/experts.h"

namespace moebius::cuda::sm90 {

// How the two consumer warpgroups of a block share the tensor cores. In turns, one multiplies while the other adds the
// last product to its sums; freely, both may multiply and then both add.
enum class WgradTurns {
  free,
  after_issue,    // a warpgroup lets the other multiply once it has issued its own product
  after_product,  // a warpgroup lets the other multiply once its own product is complete
};

// wgrad_product_f8() has WgradTurns::free.
void wgrad_product_f8_in_turns(Stream& s, const WgradProductF8& a, const char* who, WgradTurns turns);

}  // namespace moebius::cuda::sm90
