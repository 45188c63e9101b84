// tile_gemm by oneDNN. Teams belong to the pool, so the pool's setting of one
// OpenMP thread must hold where this is called.
#pragma once

#include "ops/gemm/cpu/tile_gemm.h"

namespace moebius::cpu {

// Primitives are kept per thread by (m, n, k, leading dimensions, dtypes), the kMaxPrimitives used
// last: a new one costs about 0.1 ms, a kept one about 1 us. Callers with varying rows should cut
// them in few different sizes.
constexpr int kMaxPrimitives = 512;
void dnnl_gemm(const TileGemm& g);

}  // namespace moebius::cpu
