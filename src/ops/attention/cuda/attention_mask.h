// The keys that a query attends to, and exponentials of base 2, which the tensor-core kernels use.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/attention.h"

namespace moebius::cuda {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Query i of sequence b attends to the keys from first_key to last_key; to none if the last is before the first. Its
// document begins at position doc_start.
__device__ inline int64_t first_key_of(const AttentionSizes& z, int64_t doc_start, int64_t i) {
  int64_t first = doc_start - z.kv_first;
  if (z.window > 0 && z.shift + i - z.window + 1 > first) first = z.shift + i - z.window + 1;
  return first > 0 ? first : 0;
}
__device__ inline int64_t first_key(const AttentionSizes& z, int64_t b, int64_t i) {
  return first_key_of(z, z.doc_start ? z.doc_start[b * z.rows + i] : 0, i);
}
__device__ inline int64_t last_key(const AttentionSizes& z, int64_t i) {
  return z.shift + i < z.kv_rows ? z.shift + i : z.kv_rows - 1;
}

// Returns the end of the queries in [from, z.rows) that attend to keys below key_end. All lanes of a warp call it and
// get the same result.
__device__ inline int64_t seen_end(const AttentionSizes& z, int64_t b, int64_t from, int64_t key_end) {
  int64_t lo = from, hi = z.rows;
  const int64_t past_window = key_end - 1 + z.window - z.shift;
  if (z.window > 0 && past_window < hi) hi = past_window;
  if (!z.doc_start) return hi;
  const int lane = threadIdx.x % 32;
  while (lo < hi) {  // the first query whose document begins at key_end or later: 32 probes at a time
    const int64_t step = (hi - lo + 31) / 32, i = lo + lane * step;
    const uint32_t past = __ballot_sync(~0u, i >= hi || z.doc_start[b * z.rows + i] - z.kv_first >= key_end);
    const int first = past ? __ffs(static_cast<int>(past)) - 1 : 32;
    if (first == 0) return lo;
    if (lo + first * step < hi) hi = lo + first * step;
    lo += (first - 1) * step + 1;
  }
  return lo;
}

}  // namespace moebius::cuda
