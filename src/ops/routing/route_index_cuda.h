// Where a block of tokens finds its rows: device code that the counting sort and the dropping share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/routing/routing_cuda.h"

namespace moebius::cuda {

constexpr int kIndexThreads = 256;
constexpr int kExpertsPerThread = 4;  // kIndexThreads times this: the most experts

// Shared memory of a block: first row of each expert, and its tokens as bits.
struct BlockIndex {
  int32_t* offset_E1;
  uint64_t* tokens_E;
};

inline size_t block_index_bytes(int64_t num_experts) {
  return static_cast<size_t>(8 * num_experts + 4 * (num_experts + 2));
}

__device__ inline BlockIndex block_index(void* shared, int num_experts) {
  auto* tokens = static_cast<uint64_t*>(shared);
  return {reinterpret_cast<int32_t*>(tokens + num_experts), tokens};
}

// offset_E1 = exclusive sum of min(total, most). All kIndexThreads threads call it, and it ends with a barrier.
__device__ inline void sum_totals(const int32_t* total_E, int num_experts, int32_t most, int32_t* offset_E1) {
  __shared__ int32_t warp_total[kIndexThreads / 32];
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
  for (int w = 0; w < warp; ++w) row += warp_total[w];
#pragma unroll
  for (int j = 0; j < kExpertsPerThread; ++j) {
    if (first + j <= num_experts) offset_E1[first + j] = row;
    row += count[j];
  }
  if (threadIdx.x == kIndexThreads - 1 && num_experts == kIndexThreads * kExpertsPerThread)
    offset_E1[num_experts] = row;
  __syncthreads();
}

// fn(pair, expert, rows of the expert before it) for the pairs of a block that pair_row (if any) does not say are
// dropped. A token meets an expert once: the bits below its own count the tokens before it. REQUIRES: a barrier before.
template <class F>
__device__ void for_each_pair(const BlockIndex& index, const int32_t* topk_TK, const int32_t* pair_row_TK,
                              const int32_t* start_BE, int num_tokens, int num_experts, int top_k, F&& fn) {
  const int64_t begin = blockIdx.x * kTokensPerBlock,
                end = min(begin + kTokensPerBlock, static_cast<int64_t>(num_tokens));
  for (int i = threadIdx.x; i < num_experts; i += kIndexThreads) index.tokens_E[i] = 0;
  __syncthreads();
  for (int64_t p = begin * top_k + threadIdx.x; p < end * top_k; p += kIndexThreads) {
    if (pair_row_TK != nullptr && pair_row_TK[p] < 0) continue;
    atomicOr(reinterpret_cast<unsigned long long*>(&index.tokens_E[topk_TK[p]]), 1ull << (p / top_k - begin));
  }
  __syncthreads();
  for (int64_t p = begin * top_k + threadIdx.x; p < end * top_k; p += kIndexThreads) {
    if (pair_row_TK != nullptr && pair_row_TK[p] < 0) continue;
    const int expert = topk_TK[p];
    const uint64_t before = index.tokens_E[expert] & ((1ull << (p / top_k - begin)) - 1);
    fn(p, expert, start_BE[static_cast<int64_t>(blockIdx.x) * num_experts + expert] + __popcll(before));
  }
}

}  // namespace moebius::cuda
