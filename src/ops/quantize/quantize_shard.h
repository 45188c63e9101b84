// Quantised weights whose masters are sharded over ranks. Each rank has the elements [first, first + n) of the whole,
// which may begin and end anywhere in a block.
//
// The result is that of quantize() for the whole weights: f8_e4m3 with square_blocks, from values that
// are rounded to the dtype of the computation first. Ranks exchange the largest magnitudes of blocks
// between the two ops, and their elements after them.
#pragma once

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// bits[b] = the bits of the largest |x| in block b, 0 where no element of it is here
//
// The bits of magnitudes are ordered as integers, with infinity and then NaN above all numbers. Blocks are in the
// order of their scales.
struct BlockMagnitudes {
  Tensor bits_B;               // out i32
  Tensor x_n;                  // in f32
  Shape whole;                 // shape of the weights, rank 2 or 3
  int64_t first = 0;           // the place of x[0] in them
  DType rounded = DType::f32;  // f32 or bf16: x is rounded to it
};
void block_magnitudes(Stream& s, const BlockMagnitudes& a);
Cost cost(const BlockMagnitudes& a);

// scales[b] = the scale of the largest of bits[r, first_block + b] over all ranks r
// q[i] = x[i] / the scale of its block, rounded and saturated as in quantize()
//
// The scales are square_blocks of the whole weights, all of which are written.
struct QuantizeShard {
  Tensor q_n;      // out f8_e4m3
  Tensor scales;   // out f32, scale_shape(square_blocks, whole)
  Tensor bits_WB;  // in i32, of W ranks, each with the blocks of one or more weights
  int64_t first_block = 0;
  Tensor x_n;         // in f32
  Shape whole;        // shape of the weights, rank 2 or 3
  int64_t first = 0;  // the place of x[0] in them
  DType rounded = DType::f32;
};
void quantize_shard(Stream& s, const QuantizeShard& a);
Cost cost(const QuantizeShard& a);

}  // namespace moebius
