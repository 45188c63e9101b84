// A counting sort of the pairs by expert, stable in tokens: blocks of tokens have counted, a scan
// over the blocks gives each its first row in every expert, and the blocks then place their pairs
// at once.
#include <algorithm>
#include <limits>

#include "device/cuda/cuda.h"
#include "ops/cuda/early_launch.h"
#include "ops/routing/cuda/route_index.h"

namespace moebius::cuda {
namespace {

constexpr int kParts = 32;  // of the blocks, in a scan

// A block owns 32 experts, a thread one of them in one part of the blocks.
__global__ void __launch_bounds__(32 * kParts)
    scan_blocks_kernel(int32_t* start_BE, int32_t* total_E, int64_t* load_E, int num_blocks, int num_experts) {
  __shared__ int32_t sums[kParts][32];
  const int expert = blockIdx.x * 32 + threadIdx.x, part = threadIdx.y;
  const int length = (num_blocks + kParts - 1) / kParts;
  const int begin = min(part * length, num_blocks), end = min(begin + length, num_blocks);
  let_next_start();
  wait_for_inputs();
  int32_t sum = 0;
  if (expert < num_experts) {
#pragma unroll 8
    for (int b = begin; b < end; ++b) sum += start_BE[static_cast<int64_t>(b) * num_experts + expert];
  }
  sums[part][threadIdx.x] = sum;
  __syncthreads();
  if (expert >= num_experts) return;
  int32_t start = 0;
  for (int p = 0; p < part; ++p) start += sums[p][threadIdx.x];
#pragma unroll 8
  for (int b = begin; b < end; ++b) {
    int32_t& cell = start_BE[static_cast<int64_t>(b) * num_experts + expert];
    const int32_t count = cell;
    cell = start;
    start += count;
  }
  if (part != kParts - 1) return;
  total_E[expert] = start;
  if (load_E != nullptr) load_E[expert] += start;
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

__device__ void store_counts(const Index& a, const int32_t* offset_E1) {
  for (int i = threadIdx.x; i < a.num_experts; i += kIndexThreads) {
    a.counts_E[i] = offset_E1[i + 1] - offset_E1[i];
    a.offsets_E1[i + 1] = offset_E1[i + 1];
  }
  if (threadIdx.x != 0) return;
  a.offsets_E1[0] = 0;
  if (a.dropped_1 != nullptr) *a.dropped_1 += static_cast<int64_t>(a.num_tokens) * a.top_k - offset_E1[a.num_experts];
}

// A block owns kTokensPerBlock tokens and places their pairs; the first also writes the counts.
__global__ void __launch_bounds__(kIndexThreads) index_rows_kernel(Index a) {
  extern __shared__ uint64_t shared[];
  let_next_start();
  wait_for_inputs();
  const BlockIndex index = block_index(shared, a.num_experts);
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

}  // namespace

void scan_blocks(Stream& s, const RouteFwd& a, const RouteScratch& scratch, bool add_load) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1);
  int64_t* load = add_load && !a.load_E.empty() ? a.load_E.ptr<int64_t>() : nullptr;
  const LaunchShape how{.blocks = static_cast<unsigned>(div_ceil(E, 32)), .threads = dim3(32, kParts)};
  launch_kernel(s, T <= kEarlyRows, how, scan_blocks_kernel, scratch.start_BE, scratch.total_E, load,
                static_cast<int>(div_ceil(T, kTokensPerBlock)), static_cast<int>(E));
  check_launch("route_fwd");
}

void index_rows(Stream& s, const RouteFwd& a, const RouteScratch& scratch, bool dropped_before) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const bool by_position = a.rule.capacity > 0 && !dropped_before;
  const Index args{.counts_E = a.route.counts_E.ptr<int32_t>(),
                   .offsets_E1 = a.route.offsets_E1.ptr<int32_t>(),
                   .row_token_R = a.route.row_token_R.ptr<int32_t>(),
                   .row_pair_R = a.route.row_pair_R.ptr<int32_t>(),
                   .pair_row_TK = a.route.pair_row_TK.ptr<int32_t>(),
                   .weight_TK = a.route.weight_TK.ptr<float>(),
                   .dropped_1 = a.dropped_1.empty() ? nullptr : a.dropped_1.ptr<int64_t>(),
                   .topk_TK = a.route.topk_TK.ptr<int32_t>(),
                   .start_BE = scratch.start_BE,
                   .total_E = scratch.total_E,
                   .capacity = static_cast<int32_t>(std::min<int64_t>(by_position ? a.rule.capacity : INT32_MAX,
                                                                      std::numeric_limits<int32_t>::max())),
                   .dropped_before = dropped_before,
                   .num_tokens = static_cast<int>(T),
                   .num_experts = static_cast<int>(E),
                   .top_k = static_cast<int>(K)};
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(1, div_ceil(T, kTokensPerBlock)));
  const LaunchShape how{.blocks = blocks, .threads = kIndexThreads, .shared_bytes = block_index_bytes(E)};
  launch_kernel(s, T <= kEarlyRows, how, index_rows_kernel, args);
  check_launch("route_fwd");
}

}  // namespace moebius::cuda
