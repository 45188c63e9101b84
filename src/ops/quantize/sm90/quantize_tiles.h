// Quantising bf16 to E4M3 with blocks of 128, at the speed of memory.
#pragma once

#include "ops/quantize/quantize.h"
#include "ops/quantize/quantized_rows.h"

namespace moebius::cuda::sm90 {

// Returns whether quantize_tiles supports it: bf16, row_blocks or square_blocks, and rows that begin at multiples
// of 16 bytes of x and of 8 of q, or where q is transposed of 16.
bool takes_tiles(const Quantize& a);
void quantize_tiles(Stream& s, const Quantize& a);

// Returns whether pack_tiles supports it: bf16, and rows that begin at multiples of 16 bytes.
bool takes_tiles(const PackQuantizedRows& a);
void pack_tiles(Stream& s, const PackQuantizedRows& a);

}  // namespace moebius::cuda::sm90
