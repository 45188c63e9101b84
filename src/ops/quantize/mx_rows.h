// Rows of activations and gradients as the products of mxfp8 read them where they are emulated: each number is
// quantised, and its value is stored in the dtype of the rows. Elements and scales have the formulas of quantize.h,
// f8_e4m3 with mx_blocks, and are not stored.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// y[r] = the values of row r, which is x[token[r]], or x[r] without token
//
// y has the bits that dequantize() or dequantize_transposed() has after quantize(); x and y are f32 or bf16.
// A block is 32 columns of a row. Or it is 32 rows of an expert in one column, as in a transposed operand: the blocks
// of an expert begin at its first row.
struct MxRound {
  Tensor y_RC;        // out, dtype of x
  Tensor x_NC;        // in
  Tensor offsets_e1;  // in i32, may be empty; rows at and past the last offset are neither read nor written
  Tensor token_R;     // in i32, may be empty; only with blocks_of_rows and offsets
  bool blocks_of_rows = false;
};
void mx_round(Stream& s, const MxRound& a);
Cost cost(const MxRound& a);

}  // namespace moebius
