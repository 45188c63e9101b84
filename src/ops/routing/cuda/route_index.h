// Device code by which a block of tokens finds its rows. The counting sort and the dropping share it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/expert_offsets.h"
#include "ops/routing/cuda/routing.h"

namespace moebius::cuda {

constexpr int kIndexThreads = kOffsetThreads;

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

// Calls fn(pair, expert, rows of the expert before it) for the pairs of a block, except those that pair_row (if not
// null) marks as dropped. A token has an expert at most once: the bits below its own count the tokens before it.
// REQUIRES: a barrier before.
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
