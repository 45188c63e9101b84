// Dequantises pieces of the rows of a matrix, for the packing of products on the CPU.
#pragma once

#include "core/quantized.h"

namespace moebius::cpu {

// to[j] = the value of q.data[matrix][row, col + j], j < n. With f4_e2m1, col is even.
void dequantize_row(float* to, const Operand& q, int64_t matrix, int64_t row, int64_t col, int64_t n);

}  // namespace moebius::cpu
