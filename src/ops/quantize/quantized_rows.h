// Rows of f8_e4m3 with their row_blocks scales, as ranks exchange them.
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
struct PackQuantizedRows {
  Tensor rows_TB;  // out u8 [T, quantized_row_bytes(D)]
  Tensor x_TD;     // in
};
void pack_quantized_rows(Stream& s, const PackQuantizedRows& a);
Cost cost(const PackQuantizedRows& a);

// x[t] = the values of rows[t], rounded once
struct UnpackQuantizedRows {
  Tensor x_TD;     // out f32 or bf16
  Tensor rows_TB;  // in u8 [T, quantized_row_bytes(D)]
};
void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a);
Cost cost(const UnpackQuantizedRows& a);

}  // namespace moebius
