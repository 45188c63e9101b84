// Our own kernels for gemm on CUDA: operands for trials of cuBLASLt's algorithms, and a plain product for shapes that
// cuBLASLt does not support.
#pragma once

#include "ops/gemm/gemm.h"

namespace moebius::cuda {

// An operand of a product: uniform values in [-1, 1) times scale, from a counter. The second half
// of k repeats the first, with its sign turned if asked for; the last of an odd k is 0.
struct FillTrial {
  void* to;  // out, [outer, k], or [k, outer] when k is the row
  DType dtype;
  uint32_t seed;
  int64_t outer, k;
  bool k_is_row = false, turn_sign = false;
  float scale = 1;
};
void fill_trial(Stream& s, const FillTrial& a);

// Sets differs to 1 if any bits of x and y differ, else to 0. num_bytes is a multiple of 4.
struct CompareTrial {
  int* differs;  // out
  const void *x, *y;
  int64_t num_bytes;
};
void compare_trial(Stream& s, const CompareTrial& a);

// Computes any gemm in the order of k; it is slow.
void tiled_gemm(Stream& s, const Gemm& a);

}  // namespace moebius::cuda
