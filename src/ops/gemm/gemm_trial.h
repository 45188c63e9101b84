// What gemm on CUDA needs of kernels of its own: operands for trials of cuBLASLt's algorithms, and a plain product for
// what cuBLASLt does not take.
#pragma once

#include "ops/gemm/gemm.h"

namespace moebius::cuda {

// Uniform values in [-1, 1) from a counter.
struct FillTrial {
  void* to;  // out
  int64_t num_bytes;
  DType dtype;
  uint32_t seed;
};
void fill_trial(Stream& s, const FillTrial& a);

// differs = 1 where the bits of x and y do, else 0. num_bytes is a multiple of 4.
struct CompareTrial {
  int* differs;  // out
  const void *x, *y;
  int64_t num_bytes;
};
void compare_trial(Stream& s, const CompareTrial& a);

// Any gemm, in order of k. Slow.
void tiled_gemm(Stream& s, const Gemm& a);

}  // namespace moebius::cuda
