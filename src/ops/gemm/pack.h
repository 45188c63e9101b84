// Copies blocks of matrices into the layouts that the kernel of widened_gemm reads, as f32.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace moebius::cpu {

constexpr int64_t kPanelCols = 32;

// Rows [0, rows) and columns [0, cols) of x[i * ld + j] to to[i * to_ld + j].
template <class T>
void widen(float* to, int64_t to_ld, const T* x, int64_t ld, int64_t rows, int64_t cols);

// B, k x n, as panels of kPanelCols columns: to[(j / 32 * k + p) * 32 + j % 32] = b[p * ld + j], columns past n are
// zero.
template <class T>
void pack_panels(float* to, const T* b, int64_t ld, int64_t k, int64_t n);

// The same from the transpose: b[j * ld + p].
template <class T>
void pack_panels_transposed(float* to, const T* b, int64_t ld, int64_t k, int64_t n);

}  // namespace moebius::cpu
