// Two bf16 in a word: the first one is in its low half.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace moebius::cuda::sm80 {

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

}  // namespace moebius::cuda::sm80
