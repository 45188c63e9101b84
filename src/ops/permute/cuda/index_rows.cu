// index_rows is a counting sort, stable in tokens: blocks of tokens count, a scan over the blocks
// gives each its first row in every expert, and the blocks then place their pairs at once. Counts
// never leave the device.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/expert_offsets.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/index_rows_blocks.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = kOffsetThreads;
constexpr int kParts = 32;  // of the blocks, in a scan

struct Index {
  int32_t *counts_e, *offsets_e1, *row_token_R, *row_pair_R, *pair_row_TK;
  int32_t *start_Be, *total_e;
  const int32_t *topk_TK, *kept_TK;
  int64_t num_tokens;
  int first_expert, num_experts, top_k;
};

// Returns the expert here of a pair, or -1.
__device__ int expert_of(const Index& a, int64_t pair) {
  const int expert = a.topk_TK[pair] - a.first_expert;
  const bool dropped = a.kept_TK != nullptr && a.kept_TK[pair] < 0;
  return expert < 0 || expert >= a.num_experts || dropped ? -1 : expert;
}

// Returns the first pair of a block's tokens.
__device__ int64_t first_pair(const Index& a) { return blockIdx.x * kTokensPerIndexBlock * a.top_k; }
__device__ int64_t last_pair(const Index& a) {
  return min((blockIdx.x + 1) * kTokensPerIndexBlock, a.num_tokens) * a.top_k;
}

__global__ void __launch_bounds__(kThreads) count_blocks_kernel(Index a) {
  extern __shared__ uint64_t shared[];
  auto* count_e = reinterpret_cast<int32_t*>(shared);
  for (int i = threadIdx.x; i < a.num_experts; i += kThreads) count_e[i] = 0;
  __syncthreads();
  for (int64_t p = first_pair(a) + threadIdx.x; p < last_pair(a); p += kThreads) {
    const int expert = expert_of(a, p);
    if (expert >= 0) atomicAdd(&count_e[expert], 1);
  }
  __syncthreads();
  int32_t* out = a.start_Be + static_cast<int64_t>(blockIdx.x) * a.num_experts;
  for (int i = threadIdx.x; i < a.num_experts; i += kThreads) out[i] = count_e[i];
}

// A block owns 32 experts, a thread one of them in one part of the blocks of tokens.
__global__ void __launch_bounds__(32 * kParts) scan_blocks_kernel(Index a, int num_blocks) {
  __shared__ int32_t sums[kParts][32];
  const int expert = blockIdx.x * 32 + threadIdx.x, part = threadIdx.y;
  const int length = (num_blocks + kParts - 1) / kParts;
  const int begin = min(part * length, num_blocks), end = min(begin + length, num_blocks);
  int32_t sum = 0;
  for (int b = begin; b < end && expert < a.num_experts; ++b)
    sum += a.start_Be[static_cast<int64_t>(b) * a.num_experts + expert];
  sums[part][threadIdx.x] = sum;
  __syncthreads();
  if (expert >= a.num_experts) return;
  int32_t start = 0;
  for (int p = 0; p < part; ++p) start += sums[p][threadIdx.x];
  for (int b = begin; b < end; ++b) {
    int32_t& cell = a.start_Be[static_cast<int64_t>(b) * a.num_experts + expert];
    const int32_t count = cell;
    cell = start;
    start += count;
  }
  if (part == kParts - 1) a.total_e[expert] = start;
}

// A block owns kTokensPerIndexBlock tokens and places their pairs; the first also writes the
// counts. A token has an expert at most once. With an expert's tokens as a bit set, the set bits below a token's own
// are the tokens before it.
__global__ void __launch_bounds__(kThreads) place_rows_kernel(Index a) {
  extern __shared__ uint64_t tokens_e[];
  auto* offset_e1 = reinterpret_cast<int32_t*>(tokens_e + a.num_experts);
  for (int i = threadIdx.x; i < a.num_experts; i += kThreads) tokens_e[i] = 0;
  sum_totals(a.total_e, a.num_experts, INT32_MAX, offset_e1);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i <= a.num_experts; i += kThreads) {
      a.offsets_e1[i] = offset_e1[i];
      if (a.counts_e != nullptr && i < a.num_experts) a.counts_e[i] = offset_e1[i + 1] - offset_e1[i];
    }
  }
  const int64_t first_token = blockIdx.x * kTokensPerIndexBlock;
  for (int64_t p = first_pair(a) + threadIdx.x; p < last_pair(a); p += kThreads) {
    const int expert = expert_of(a, p);
    if (expert < 0) continue;
    atomicOr(reinterpret_cast<unsigned long long*>(&tokens_e[expert]), 1ull << (p / a.top_k - first_token));
  }
  __syncthreads();
  const int32_t* start_e = a.start_Be + static_cast<int64_t>(blockIdx.x) * a.num_experts;
  for (int64_t p = first_pair(a) + threadIdx.x; p < last_pair(a); p += kThreads) {
    const int expert = expert_of(a, p);
    if (expert < 0) {
      a.pair_row_TK[p] = -1;
      continue;
    }
    const int64_t token = p / a.top_k;
    const uint64_t before = tokens_e[expert] & ((1ull << (token - first_token)) - 1);
    const int32_t row = offset_e1[expert] + start_e[expert] + __popcll(before);
    a.row_token_R[row] = static_cast<int32_t>(token);
    if (a.row_pair_R != nullptr) a.row_pair_R[row] = static_cast<int32_t>(p);
    a.pair_row_TK[p] = row;
  }
}

// Returns the sum over the threads of a block, on all of them.
__device__ int32_t block_sum(int32_t x) {
  __shared__ int32_t warp_total[kThreads / 32];
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(0xffffffffu, x, width);
  if (threadIdx.x % 32 == 0) warp_total[threadIdx.x / 32] = x;
  __syncthreads();
  int32_t sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += warp_total[w];
  __syncthreads();
  return sum;
}

struct Arrivals {
  int32_t *offsets_e1, *arrival_R, *row_R;
  const int32_t* counts_WE;  // from the first expert here
  int num_ranks, num_experts, stride;
};

// A block owns the rows of one expert that come from one rank.
__global__ void __launch_bounds__(kThreads) index_arrivals_kernel(Arrivals a) {
  const int rank = blockIdx.x / a.num_experts, expert = blockIdx.x % a.num_experts;
  int32_t rows_before = 0, arrived_before = 0;  // sorted by expert; in the order of arrival
  for (int i = threadIdx.x; i < a.num_ranks * a.num_experts; i += kThreads) {
    const int q = i / a.num_experts, other = i % a.num_experts;
    const int32_t count = a.counts_WE[static_cast<int64_t>(q) * a.stride + other];
    if (other < expert || (other == expert && q < rank)) rows_before += count;
    if (q < rank || (q == rank && other < expert)) arrived_before += count;
  }
  const int32_t row = block_sum(rows_before), arrival = block_sum(arrived_before);
  const int32_t count = a.counts_WE[static_cast<int64_t>(rank) * a.stride + expert];
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    a.arrival_R[row + i] = arrival + i;
    a.row_R[arrival + i] = row + i;
  }
  if (threadIdx.x != 0) return;
  if (rank == 0) a.offsets_e1[expert] = row;
  if (rank == a.num_ranks - 1 && expert == a.num_experts - 1) a.offsets_e1[a.num_experts] = row + count;
}

}  // namespace

void index_rows(Stream& s, const IndexRows& a) {
  const int64_t T = a.topk_TK.dim(0), e = a.offsets_e1.numel() - 1, blocks = div_ceil(T, kTokensPerIndexBlock);
  auto* start_Be = static_cast<int32_t*>(a.scratch.data);
  const Index args{.counts_e = a.counts_e.empty() ? nullptr : a.counts_e.ptr<int32_t>(),
                   .offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                   .row_token_R = a.row_token_R.ptr<int32_t>(),
                   .row_pair_R = a.row_pair_R.empty() ? nullptr : a.row_pair_R.ptr<int32_t>(),
                   .pair_row_TK = a.pair_row_TK.ptr<int32_t>(),
                   .start_Be = start_Be,
                   .total_e = start_Be + blocks * e,
                   .topk_TK = a.topk_TK.ptr<int32_t>(),
                   .kept_TK = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>(),
                   .num_tokens = T,
                   .first_expert = static_cast<int>(a.first_expert),
                   .num_experts = static_cast<int>(e),
                   .top_k = static_cast<int>(a.topk_TK.dim(1))};
  const auto shared = static_cast<size_t>(8 * e + 4 * (e + 2));
  const auto grid = static_cast<unsigned>(std::max<int64_t>(1, blocks));
  if (blocks > 0) count_blocks_kernel<<<grid, kThreads, shared, cuda_stream(s)>>>(args);
  scan_blocks_kernel<<<static_cast<unsigned>(div_ceil(e, 32)), dim3(32, kParts), 0, cuda_stream(s)>>>(
      args, static_cast<int>(blocks));
  place_rows_kernel<<<grid, kThreads, shared, cuda_stream(s)>>>(args);
  check_launch("index_rows");
}

void index_arrivals(Stream& s, const IndexArrivals& a) {
  const Arrivals args{.offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                      .arrival_R = a.arrival_R.ptr<int32_t>(),
                      .row_R = a.row_R.ptr<int32_t>(),
                      .counts_WE = a.counts_WE.ptr<int32_t>() + a.first_expert,
                      .num_ranks = static_cast<int>(a.counts_WE.dim(0)),
                      .num_experts = static_cast<int>(a.offsets_e1.numel() - 1),
                      .stride = static_cast<int>(a.counts_WE.dim(1))};
  const auto blocks = static_cast<unsigned>(args.num_ranks * args.num_experts);
  index_arrivals_kernel<<<blocks, kThreads, 0, cuda_stream(s)>>>(args);
  check_launch("index_arrivals");
}

}  // namespace moebius::cuda
