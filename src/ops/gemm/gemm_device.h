// The memory that gemm() keeps on a GPU, and the algorithms that it has chosen there.
#pragma once

#include <string>

#include "ops/gemm/gemm.h"

namespace moebius {

// Bytes of GPU memory that it keeps: cuBLASLt's workspace, memory to time algorithms, and the result of a comparison.
constexpr int64_t kGemmKeptBytes = (int64_t{128} << 20) + 256;

// On a GPU, opens the library and allocates this memory now instead of at the first product. Elsewhere does nothing.
void prepare_gemm(Stream& s);

// Returns the algorithm of this product on the GPU of s: cuBLASLt's, with its attributes as numbers; "tiled_gemm"; or
// "no algorithm chosen yet" before the first run. Empty elsewhere.
std::string gemm_algorithm_text(Stream& s, const Gemm& a);

}  // namespace moebius
