// Copies blocks of matrices into the layouts that the kernel of widened_gemm reads, as f32.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "ops/cpu/lanes.h"

namespace moebius::cpu {

constexpr int64_t kPanelCols = 2 * kNumLanes;  // columns of B: 32 with AVX-512, 16 with AVX2
constexpr int64_t kRowPanel = 48;  // columns of the transpose of A, which are rows of A: four kernels of 12, eight of 6

// Copies rows [0, rows) and columns [0, cols) of x[i * ld + j] to to[i * to_ld + j].
template <class T>
void widen(float* to, int64_t to_ld, const T* x, int64_t ld, int64_t rows, int64_t cols);

// Packs b[p * ld + j], k x n, into panels of kCols columns: to[(j / kCols * k + p) * kCols + j % kCols]; columns past n
// are zero. It reads b row by row, since sequential reads are fastest.
template <int64_t kCols, class T>
void pack_panels(float* to, const T* b, int64_t ld, int64_t k, int64_t n);

// Does the same from the transpose, b[j * ld + p], in panels of kPanelCols.
template <class T>
void pack_panels_transposed(float* to, const T* b, int64_t ld, int64_t k, int64_t n);

}  // namespace moebius::cpu
