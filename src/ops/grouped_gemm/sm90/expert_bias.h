// Biases in the grouped products on sm_90a: added to the f32 sums of a tile before they are rounded.
#pragma once

#include "core/tensor.h"
#include "ops/sm90/sm90.h"

namespace moebius::cuda {

// One bias of each expert, bf16 [experts, columns]. It belongs to the columns [first, first + columns) of
// the product; others have none. Both are even.
struct ExpertBias {
  const uint16_t* b;
  int32_t first, columns;  // no columns: no bias

  // Returns two neighbouring columns, from an even one on; zeros where there is no bias.
  __device__ __forceinline__ uint32_t pair(int32_t expert, int32_t column) const {
    const int32_t at = column - first;
    const uint16_t* from = b + static_cast<int64_t>(expert) * columns + at;
    uint32_t word = 0;
    asm volatile("{ .reg .pred there;\n setp.lt.u32 there, %2, %3;\n @there ld.global.nc.b32 %0, [%1]; }"
                 : "+r"(word)
                 : "l"(from), "r"(static_cast<uint32_t>(at)), "r"(static_cast<uint32_t>(columns)));
    return word;
  }
};

// b: bf16 [experts, columns], or empty.
inline ExpertBias expert_bias(const Tensor& b, int64_t first) {
  if (b.empty()) return {nullptr, 0, 0};
  return {static_cast<const uint16_t*>(b.data), static_cast<int32_t>(first), static_cast<int32_t>(b.dim(1))};
}

// Returns whether pairs of columns can be read as words.
inline bool takes_bias(const Tensor& b, int64_t first) {
  return b.empty() || (b.dtype == DType::bf16 && first % 2 == 0 && b.dim(1) % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(b.data) % 4 == 0);
}

// Loads the biases of a consumer thread's columns, in pairs. column_of(j) is the first of the eight columns
// that sums [4 j, 4 j + 4) belong to.
template <class ColumnOf>
__device__ __forceinline__ void load_bias_pairs(uint32_t (&pairs)[32], const ExpertBias& bias, int32_t expert,
                                                const ColumnOf& column_of) {
  const auto lane_column = static_cast<int32_t>(threadIdx.x % 4 * 2);
#pragma unroll
  for (int j = 0; j < 32; ++j) pairs[j] = bias.pair(expert, column_of(j) + lane_column);
}

__device__ __forceinline__ void add_bias(float (&sums)[128], const uint32_t (&pairs)[32]) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const float even = low_bf16(pairs[j]), odd = high_bf16(pairs[j]);
    sums[4 * j] += even;
    sums[4 * j + 1] += odd;
    sums[4 * j + 2] += even;
    sums[4 * j + 3] += odd;
  }
}

}  // namespace moebius::cuda
