// Rows of f8_e4m3 with their row_blocks scales, as ranks exchange them and as layers save activations.
// A row of D elements has these bytes:
//   D elements, ceil(D / 128) scales in f32, and padding up to a multiple of 16
// Elements and scales are those of quantize() and values those of dequantize().
#pragma once

#include "core/quantized.h"
#include "device/device.h"

namespace moebius {

// The bytes of such a row.
int64_t quantized_row_bytes(int64_t D);

// rows[t] = the elements and scales of x[t]
//
// x is f32 or bf16. The unused bytes are not written.
// offsets: of rows sorted by expert, as in Rows (ops/experts/experts.h). Rows before the first offset, and at and past
// the last one, are neither read nor written. Empty: all rows.
struct PackQuantizedRows {
  Tensor rows_TB;          // out u8 [T, quantized_row_bytes(D)]
  Tensor x_TD;             // in
  Tensor offsets_e1 = {};  // in i32, may be empty
};
void pack_quantized_rows(Stream& s, const PackQuantizedRows& a);
Cost cost(const PackQuantizedRows& a);

// x[t] = the values of rows[t], rounded once; offsets as in PackQuantizedRows
struct UnpackQuantizedRows {
  Tensor x_TD;     // out f32 or bf16
  Tensor rows_TB;  // in u8 [T, quantized_row_bytes(D)]
  Tensor offsets_e1 = {};
};
void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a);
Cost cost(const UnpackQuantizedRows& a);

}  // namespace moebius
