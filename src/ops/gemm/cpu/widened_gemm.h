// tile_gemm by f32 multiply-adds: blocks of the operands are widened to f32 while they are packed,
// so that bf16 costs what f32 costs. Written for AVX-512 and for AVX2.
//
// C is cut in blocks of 512 x 512 and K in blocks of 512 (AVX2: 256). B's block is packed in panels
// of 32 columns (16) and stays in the second-level cache; 12 rows of A (6) at a time stay in the
// first while all panels stream past; a kernel keeps 12 x 32 (6 x 16) sums in registers. The order
// of a sum is fixed by k alone.
#pragma once

#include "ops/gemm/cpu/tile_gemm.h"

namespace moebius::cpu {

void widened_gemm(const TileGemm& g);

}  // namespace moebius::cpu
