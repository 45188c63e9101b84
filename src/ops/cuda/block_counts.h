// The sums of counts that blocks of an earlier kernel stored (ops/token_blocks.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moebius::cuda {

// before[i] = sum over b < block of counts[b,i];  total[i] = sum over all b of counts[b,i], unless total is null
//
// Both are shared memory, and counts has n columns. All kThreads threads of a block call it, and it ends with a
// barrier. Sums of integers do not depend on the order of the atomic operations.
template <int kThreads>
__device__ __forceinline__ void sum_counts(const int32_t* counts_Bn, int num_blocks, int n, int block,
                                           int32_t* before_n, int32_t* total_n) {
  for (int i = threadIdx.x; i < n; i += kThreads) {
    before_n[i] = 0;
    if (total_n != nullptr) total_n[i] = 0;
  }
  __syncthreads();
  const int parts = max(1, kThreads / n), end = total_n != nullptr ? num_blocks : block;
  for (int i = threadIdx.x; i < parts * n; i += kThreads) {
    const int part = i / n, column = i - part * n;
    int32_t before = 0, total = 0;
#pragma unroll 8
    for (int b = part; b < end; b += parts) {
      const int32_t count = counts_Bn[static_cast<int64_t>(b) * n + column];
      total += count;
      before += b < block ? count : 0;
    }
    if (before != 0) atomicAdd(&before_n[column], before);
    if (total_n != nullptr && total != 0) atomicAdd(&total_n[column], total);
  }
  __syncthreads();
}

}  // namespace moebius::cuda
