// A block of tokens finds its rows here. The counting sort and the dropping share this device code.
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

// fn(pair, expert, rows of the expert before it) for the pairs of a block that pair_row (if any)
// does not say are dropped. A token meets an expert once: the bits below its own count the tokens
// before it. Without start_BE this block is the first. REQUIRES: a barrier before.
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
    const int32_t start = start_BE ? start_BE[static_cast<int64_t>(blockIdx.x) * num_experts + expert] : 0;
    fn(p, expert, start + __popcll(before));
  }
}

struct Index {
  int32_t *counts_E, *offsets_E1, *row_token_R, *row_pair_R, *pair_row_TK;
  float* weight_TK;
  int64_t* dropped_1;
  const int32_t *topk_TK, *start_BE, *total_E;
  int32_t capacity;
  bool dropped_before;
  int num_tokens, num_experts, top_k;
};
// Returns the index of a whole route, whose pairs over capacity are dropped with it unless dropped_before.
Index index_of(const RouteFwd& a, const RouteScratch& scratch, bool dropped_before);

__device__ inline void store_counts(const Index& a, const int32_t* offset_E1) {
  for (int i = threadIdx.x; i < a.num_experts; i += kIndexThreads) {
    a.counts_E[i] = offset_E1[i + 1] - offset_E1[i];
    a.offsets_E1[i + 1] = offset_E1[i + 1];
  }
  if (threadIdx.x != 0) return;
  a.offsets_E1[0] = 0;
  if (a.dropped_1 != nullptr) *a.dropped_1 += static_cast<int64_t>(a.num_tokens) * a.top_k - offset_E1[a.num_experts];
}

// Places the pairs of this block's tokens; the first block also writes the counts. The block has kIndexThreads threads.
__device__ inline void index_block(const Index& a, const BlockIndex& index) {
  sum_totals(a.total_E, a.num_experts, a.capacity, index.offset_E1);
  if (blockIdx.x == 0) store_counts(a, index.offset_E1);
  for_each_pair(index, a.topk_TK, a.dropped_before ? a.pair_row_TK : nullptr, a.start_BE, a.num_tokens, a.num_experts,
                a.top_k, [&](int64_t pair, int expert, int32_t rank) {
                  const bool drop = rank >= a.capacity;
                  const int32_t row = index.offset_E1[expert] + rank;
                  a.pair_row_TK[pair] = drop ? -1 : row;
                  if (drop) {
                    a.weight_TK[pair] = 0.0f;
                  } else {
                    a.row_token_R[row] = static_cast<int32_t>(pair / a.top_k);
                    a.row_pair_R[row] = static_cast<int32_t>(pair);
                  }
                });
}

}  // namespace moebius::cuda
