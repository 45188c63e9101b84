// Quantising bf16 to FP8 with blocks of 128, or with one scale for a matrix, at the speed of memory.
#pragma once

#include "ops/quantize/quantize.h"
#include "ops/quantize/quantized_rows.h"

namespace moebius::cuda::sm90 {

// Returns whether quantize_tiles supports it: bf16 to E4M3 with row_blocks, square_blocks or per_tensor, or to E5M2
// with per_tensor, and rows that begin at multiples of 16 bytes of x and of 8 of q, or where q is transposed of 16.
bool takes_tiles(const Quantize& a);
// With per_tensor the scales hold the bits of the largest magnitude of each matrix; they are not written.
void quantize_tiles(Stream& s, const Quantize& a);
// Raises the scales of per_tensor, as bits, to the largest magnitudes of the matrices. REQUIRES: takes_tiles(a).
void largest_of_tiles(Stream& s, const Quantize& a);

// Returns whether pack_tiles supports it: bf16, and rows that begin at multiples of 16 bytes.
bool takes_tiles(const PackQuantizedRows& a);
void pack_tiles(Stream& s, const PackQuantizedRows& a);

}  // namespace moebius::cuda::sm90
