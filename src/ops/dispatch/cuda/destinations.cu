// Finds the ranks that have experts of each token, and the place of the token for each of them. This is a counting
// sort like index_rows, stable in tokens. Blocks of tokens count, and then place their tokens after those of the
// blocks before them.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/block_counts.h"
#include "ops/cuda/divisor.h"
#include "ops/cuda/early_launch.h"
#include "ops/dispatch/destination_blocks.h"
#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kTokensOfChunk = static_cast<int>(kTokensPerDestinationChunk), kWarps = kTokensOfChunk / 32;
constexpr int kThreads = kTokensOfChunk;  // a thread owns a token of a chunk
constexpr int kRanksAtOnce = 64;          // ep ranks whose tokens are counted together: the bits of a set
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Choices {
  int32_t *dest_TJ, *slot_TJ, *count_P, *counts_BP;
  const int32_t *topk_TK, *kept_TK;  // kept may be null
  int64_t num_tokens, tokens_of_block;
  int top_k, num_ranks, num_blocks;   // K, P, B
  Divisor num_dest, experts_of_rank;  // J, E/P

  // Return the begin and end of the tokens of this thread's block.
  __device__ int64_t first_token() const { return blockIdx.x * tokens_of_block; }
  __device__ int64_t last_token() const { return min(first_token() + tokens_of_block, num_tokens); }
  // Returns the ranks [first, first + kRanksAtOnce) that have experts of a token, as bits.
  __device__ uint64_t ranks_of(int64_t token, int first) const {
    const int64_t begin = token * top_k;
    uint64_t ranks = 0;
#pragma unroll 8
    for (int k = 0; k < top_k; ++k) {
      const int32_t kept = kept_TK != nullptr ? kept_TK[begin + k] : 0, expert = topk_TK[begin + k];
      const int rank = kept < 0 ? -1 : experts_of_rank.quotient(expert) - first;
      if (rank >= 0 && rank < kRanksAtOnce) ranks |= 1ull << rank;
    }
    return ranks;
  }
};

// Calls body(r, lanes) for each rank r that any lane has, with the lanes that have r as bits. All lanes call it.
template <class Body>
__device__ __forceinline__ void for_each_rank(uint64_t ranks, Body&& body) {
  const uint64_t low = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(ranks));
  const uint64_t high = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(ranks >> 32));
  for (uint64_t left = high << 32 | low; left != 0; left &= left - 1) {
    const int r = __ffsll(static_cast<long long>(left)) - 1;
    body(r, __ballot_sync(kAllLanes, (ranks >> r & 1) != 0));
  }
}

// Counts the tokens of a block for each rank.
__global__ void __launch_bounds__(kThreads) count_destinations_kernel(Choices a) {
  __shared__ int32_t count[kRanksAtOnce];
  let_next_start();
  wait_for_inputs();
  const int r = threadIdx.x;
  for (int first_rank = 0; first_rank < a.num_ranks; first_rank += kRanksAtOnce) {
    if (r < kRanksAtOnce) count[r] = 0;
    __syncthreads();
    for (int64_t first = a.first_token(); first < a.last_token(); first += kTokensOfChunk) {
      const int64_t t = first + threadIdx.x;
      for_each_rank(t < a.last_token() ? a.ranks_of(t, first_rank) : 0, [&](int rank, uint32_t lanes) {
        if (threadIdx.x % 32 == 0) atomicAdd(&count[rank], __popc(lanes));
      });
    }
    __syncthreads();
    if (r < kRanksAtOnce && first_rank + r < a.num_ranks)
      a.counts_BP[static_cast<int64_t>(blockIdx.x) * a.num_ranks + first_rank + r] = count[r];
  }
}

// The tokens of a chunk, and those of the ranks [first, first + kRanksAtOnce) that have experts of them.
struct ChunkRanks {
  uint64_t ranks[kTokensOfChunk];         // ranks of a token, as bits
  int32_t earlier[kTokensOfChunk];        // destinations of a token before `first`
  uint32_t tokens[kWarps][kRanksAtOnce];  // tokens of a warp that have the rank, as bits
  int32_t before[kWarps][kRanksAtOnce];   // tokens of earlier warps, chunks and blocks

  // A warp owns 32 tokens.
  __device__ void set_ranks(uint64_t of_token) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int r = lane; r < kRanksAtOnce; r += 32) tokens[warp][r] = 0;
    __syncwarp();
    ranks[threadIdx.x] = of_token;
    for_each_rank(of_token, [&](int r, uint32_t lanes) {
      if (lane == 0) tokens[warp][r] = lanes;
    });
  }
  // A thread owns a rank. Returns the number of tokens for it in this chunk and in all before it.
  __device__ int32_t set_before(int r, int32_t count) {
    for (int w = 0; w < kWarps; ++w) {
      before[w][r] = count;
      count += __popc(tokens[w][r]);
    }
    return count;
  }
  // Returns whether the j-th destination of a token is among these ranks, and finds its rank and its place there.
  __device__ bool find(int token, int j, int& rank, int32_t& slot) const {
    uint64_t left = ranks[token];
    const int skipped = j - earlier[token];
    if (skipped < 0 || skipped >= __popcll(left)) return false;
    for (int i = 0; i < skipped; ++i) left &= left - 1;
    rank = __ffsll(static_cast<long long>(left)) - 1;
    slot = before[token / 32][rank] + __popc(tokens[token / 32][rank] & ((1u << token % 32) - 1));
    return true;
  }
};

// A thread owns a token of a chunk, and then some destinations, which neighbours write side by side. The last block
// also writes the counts of all blocks.
__global__ void __launch_bounds__(kThreads) place_destinations_kernel(Choices a) {
  extern __shared__ int32_t count_P[];  // tokens of earlier blocks and chunks
  __shared__ ChunkRanks chunk;
  let_next_start();
  wait_for_inputs();
  sum_counts<kThreads>(a.counts_BP, a.num_blocks, a.num_ranks, blockIdx.x, count_P, nullptr);
  const int J = a.num_dest.value(), token = threadIdx.x, r = threadIdx.x;
  for (int64_t first = a.first_token(); first < a.last_token(); first += kTokensOfChunk) {
    const auto num_tokens = static_cast<int>(min(int64_t{kTokensOfChunk}, a.last_token() - first));
    chunk.earlier[token] = 0;
    for (int first_rank = 0; first_rank < a.num_ranks; first_rank += kRanksAtOnce) {
      const bool is_last = first_rank + kRanksAtOnce >= a.num_ranks;
      chunk.set_ranks(token < num_tokens ? a.ranks_of(first + token, first_rank) : 0);
      __syncthreads();
      if (r < kRanksAtOnce && first_rank + r < a.num_ranks)
        count_P[first_rank + r] = chunk.set_before(r, count_P[first_rank + r]);
      __syncthreads();
      for (int i = threadIdx.x; i < num_tokens * J; i += kThreads) {
        const int t = a.num_dest.quotient(i), j = i - t * J;
        int rank = -1, slot = -1;
        const bool found = chunk.find(t, j, rank, slot);
        // Destinations past the last one are written with the last ranks.
        if (!found && !(is_last && j >= chunk.earlier[t])) continue;
        a.dest_TJ[first * J + i] = found ? first_rank + rank : -1;
        a.slot_TJ[first * J + i] = slot;
      }
      __syncthreads();
      chunk.earlier[token] += __popcll(chunk.ranks[token]);
    }
  }
  if (blockIdx.x != gridDim.x - 1) return;
  for (int p = threadIdx.x; p < a.num_ranks; p += kThreads) a.count_P[p] = count_P[p];
}

}  // namespace

void destinations(Stream& s, const Destinations& a) {
  const TokenBlocks blocks = destination_blocks(a.topk_TK.dim(0), a.count_P.numel());
  const Choices choices{.dest_TJ = a.dest_TJ.ptr<int32_t>(),
                        .slot_TJ = a.slot_TJ.ptr<int32_t>(),
                        .count_P = a.count_P.ptr<int32_t>(),
                        .counts_BP = static_cast<int32_t*>(a.scratch.data),
                        .topk_TK = a.topk_TK.ptr<int32_t>(),
                        .kept_TK = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>(),
                        .num_tokens = a.topk_TK.dim(0),
                        .tokens_of_block = blocks.tokens_of_block,
                        .top_k = narrow<int>(a.topk_TK.dim(1)),
                        .num_ranks = narrow<int>(a.count_P.numel()),
                        .num_blocks = narrow<int>(blocks.num_blocks),
                        .num_dest = Divisor(std::max<int64_t>(1, a.dest_TJ.dim(1))),
                        .experts_of_rank = Divisor(a.experts_of_rank)};
  const LaunchShape counts{.blocks = static_cast<unsigned>(choices.num_blocks), .threads = kThreads};
  const LaunchShape places{.blocks = static_cast<unsigned>(std::max(1, choices.num_blocks)),
                           .threads = kThreads,
                           .shared_bytes = static_cast<size_t>(choices.num_ranks) * sizeof(int32_t)};
  if (choices.num_blocks > 0) launch_kernel(s, /*early=*/true, counts, count_destinations_kernel, choices);
  launch_kernel(s, /*early=*/true, places, place_destinations_kernel, choices);
  check_launch("destinations");
}

}  // namespace moebius::cuda
