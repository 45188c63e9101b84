// The memory that gemm keeps on a GPU, and the algorithms that it chose there.
#pragma once

#include <string>

#include "ops/gemm/gemm.h"

namespace moebius {

// Memory of a GPU that it keeps: cuBLASLt's workspace, room for trials of algorithms, and the answer
// of a comparison.
constexpr int64_t kGemmKeptBytes = (int64_t{128} << 20) + 256;

// On a GPU, takes it now instead of at the first product: the library's handle, its workspace, and
// room for trials of algorithms. Elsewhere it does nothing.
void prepare_gemm(Stream& s);

// The algorithm that runs this product on the GPU of s: that of cuBLASLt with its parts by their
// numbers, "tiled_gemm", or "no algorithm chosen yet" before its first run. Empty elsewhere.
std::string gemm_algorithm_text(Stream& s, const Gemm& a);

}  // namespace moebius
