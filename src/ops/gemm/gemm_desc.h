// A dense product as a value that can be printed and compared. cuBLASLt's algorithm is chosen by it.
#pragma once

#include <string>

#include "ops/gemm/gemm.h"

namespace moebius {

// c[m, n] = op(a) op(b) over k, as in Gemm. Two products with equal descs may run by the same algorithm.
struct GemmDesc {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::f32, c_dtype = DType::f32;  // dtype of a and b, and of c
  bool trans_a = false, trans_b = false, accumulate = false, bias = false;
  bool batched = false;                       // one of many products in a call, whatever their number
  int align_a = 1, align_b = 1, align_c = 1;  // bytes that the addresses are multiples of: a power of two, 16 at most
  bool operator==(const GemmDesc&) const = default;
};

// Returns a string such as "4096 x 1536 x 2048, bf16 to f32, B transposed, accumulate, aligned to 16, 16 and 16"
std::string to_string(const GemmDesc& desc);

struct GemmDescHash {
  size_t operator()(const GemmDesc& desc) const;
};

// REQUIRES: arguments that gemm() accepts.
GemmDesc describe(const Gemm& a);

}  // namespace moebius
