// The host side of grouped products of E4M3 operands with scales.
#pragma once

#include "ops/grouped_gemm/sm90/block_scaled.h"
#include "ops/grouped_gemm/sm90/launch.h"

namespace moebius::cuda {

// a: rows with row_blocks; b: [e, N, K] in memory with square_blocks.
inline BlockScales block_scales(const Operand& a, const Operand& b) {
  return {a.scales.ptr<float>(), b.scales.ptr<float>(), static_cast<int32_t>(b.scales.dim(1))};
}

}  // namespace moebius::cuda
