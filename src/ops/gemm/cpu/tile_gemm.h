// One matrix product on the calling thread, for use inside pool tasks. CPU only.
#pragma once

#include <cstdint>

#include "core/quantized.h"

namespace moebius::cpu {

// A matrix in memory: element (i, j) is at data[i * ld + j], or at data[j * ld +
// i] when transposed.
struct Matrix {
  void* data = nullptr;
  int64_t ld = 0;
  DType dtype = DType::f32;
  bool transposed = false;
  // Quantised data has this instead of the above. Element (i, p) of a is the value at (first + i, p) of
  // quantised->data, and element (p, j) of b that at (first + j, p).
  const Operand* quantised = nullptr;
  int64_t first = 0;
};

// c[m, n] = a[m, k] b[k, n], or c += with accumulate
// a and b of one dtype, f32 or bf16, or both quantised; c f32 or that dtype, not transposed. Sums in
// f32, c rounded once. Quantised matrices need widened_gemm.
// By widened_gemm a row of c does not depend on m; with AMX, dnnl_gemm chooses its instructions by m.
// REQUIRES: m, n, k >= 1.
struct TileGemm {
  Matrix c;     // out
  Matrix a, b;  // in
  int64_t m = 0, n = 0, k = 0;
  bool accumulate = false;
};

// Computes a TileGemm with the implementation that is faster on this CPU (runs_widened).
void tile_gemm(const TileGemm& g);

// Returns whether this CPU uses widened_gemm; otherwise it uses dnnl_gemm, which does not support bf16 on every CPU.
// The result depends only on the CPU and does not change during a run.
bool runs_widened();

}  // namespace moebius::cpu
