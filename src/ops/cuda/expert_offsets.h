// Computes the first row of each expert from the numbers of rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moebius::cuda {

constexpr int kOffsetThreads = 256;
constexpr int kMaxOffsets = 1024;  // the maximum number of experts

// offset_E1 = exclusive sum of min(total, most). All kThreads threads of a block call it, and it ends with a barrier.
template <int kThreads = kOffsetThreads>
__device__ inline void sum_totals(const int32_t* total_E, int num_experts, int32_t most, int32_t* offset_E1) {
  constexpr int kExpertsPerThread = kMaxOffsets / kThreads;
  __shared__ int32_t warp_total[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * kExpertsPerThread;
  int32_t count[kExpertsPerThread], sum = 0;
#pragma unroll
  for (int j = 0; j < kExpertsPerThread; ++j) {
    count[j] = first + j < num_experts ? min(total_E[first + j], most) : 0;
    sum += count[j];
  }
  int32_t inclusive = sum;
  for (int width = 1; width < 32; width *= 2) {
    const int32_t before = __shfl_up_sync(0xffffffffu, inclusive, width);
    if (lane >= width) inclusive += before;
  }
  if (lane == 31) warp_total[warp] = inclusive;
  __syncthreads();
  int32_t row = inclusive - sum;
  for (int w = 0; w < warp && first <= num_experts; ++w) row += warp_total[w];
#pragma unroll
  for (int j = 0; j < kExpertsPerThread; ++j) {
    if (first + j <= num_experts) offset_E1[first + j] = row;
    row += count[j];
  }
  if (threadIdx.x == kThreads - 1 && num_experts == kMaxOffsets) offset_E1[num_experts] = row;
  __syncthreads();
}

}  // namespace moebius::cuda
