// index_rows is a counting sort, stable in tokens: blocks of tokens count their pairs of each expert, and then place
// them after those of the blocks before them. Counts never leave the device.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/block_counts.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/expert_offsets.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/index_rows_blocks.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 1024, kArrivalThreads = 256;
constexpr int kAtOnce = 4;  // pairs that a thread loads together
constexpr int kTokensOfChunk = static_cast<int>(kTokensPerIndexChunk), kWords = kTokensOfChunk / 64;

struct Index {
  int32_t *counts_e, *offsets_e1, *row_token_R, *row_pair_R, *pair_row_TK;  // counts_e and row_pair_R may be null
  int32_t* counts_Be;
  int64_t num_tokens, tokens_of_block;
  int num_blocks, first_expert, num_experts, top_k;

  // The tokens of this thread's block.
  __device__ int64_t first_token() const { return blockIdx.x * tokens_of_block; }
  __device__ int64_t last_token() const { return min(first_token() + tokens_of_block, num_tokens); }
  // Returns the index here of an expert, or -1.
  __device__ int expert_here(int32_t expert) const {
    const int32_t i = expert - first_expert;
    return expert >= 0 && i >= 0 && i < num_experts ? i : -1;
  }
};

// The experts of pairs, in an array of their own.
struct Choices {
  const int32_t *topk_TK, *kept_TK;  // kept may be null
  int top_k;

  struct Pair {
    int32_t expert = -1;
  };
  __device__ Pair load(int64_t token, int k) const {
    const int64_t pair = token * top_k + k;
    const int32_t expert = topk_TK[pair], kept = kept_TK != nullptr ? kept_TK[pair] : 0;
    return {kept < 0 ? -1 : expert};
  }
  __device__ Pair load_whole(int64_t token, int k) const { return load(token, k); }
  __device__ void unpack(int64_t, int, const Pair&) const {}
};

// Routes that arrived: the experts of a row, and then the bits of their weights.
struct Routes {
  const int32_t *routes_N2L, *arrive_GV;
  float* weight_NL;
  int64_t rows_of_section;       // N / G
  int pairs_of_row, num_arrive;  // L, V

  struct Pair {
    int32_t expert = -1, weight = 0;
  };
  // All rows can be read, and some were not written.
  __device__ Pair load(int64_t n, int l) const {
    const int32_t expert = routes_N2L[n * (2 * pairs_of_row) + l];
    return {has_arrived(n) ? expert : -1, 0};
  }
  __device__ Pair load_whole(int64_t n, int l) const {
    const int32_t* route = routes_N2L + n * (2 * pairs_of_row) + l;
    const int32_t expert = route[0], weight = route[pairs_of_row];
    return has_arrived(n) ? Pair{expert, weight} : Pair{};
  }
  __device__ void unpack(int64_t n, int l, const Pair& pair) const {
    weight_NL[n * pairs_of_row + l] = __int_as_float(pair.weight);
  }

 private:
  __device__ bool has_arrived(int64_t n) const {
    const int64_t section = n < rows_of_section ? 0 : n / rows_of_section;
    return n - section * rows_of_section < arrive_GV[(section + 1) * num_arrive - 1];
  }
};

// Calls use(t, k, load(t, k)) for all k < top_k and t < num_tokens. kAtOnce loads of a thread are in flight at once. A
// thread owns a k of some tokens, so that it does not divide by top_k for each pair.
template <class Pair, class Load, class Use>
__device__ __forceinline__ void for_each_pair(int num_tokens, int top_k, Load&& load, Use&& use) {
  const int width = min(top_k, kThreads), stride = kThreads / width, first = static_cast<int>(threadIdx.x) / width;
  if (first >= stride) return;
  for (int k = static_cast<int>(threadIdx.x) - first * width; k < top_k; k += kThreads) {
    for (int t = first; t < num_tokens; t += stride * kAtOnce) {
      Pair pair[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (t + i * stride < num_tokens) pair[i] = load(t + i * stride, k);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (t + i * stride < num_tokens) use(t + i * stride, k, pair[i]);
    }
  }
}

// Counts the pairs of a block for each expert. It also unpacks what comes with a pair.
template <class Source>
__global__ void __launch_bounds__(kThreads) count_pairs_kernel(Index a, Source source) {
  extern __shared__ int32_t count_e[];
  let_next_start();
  wait_for_inputs();
  using Pair = typename Source::Pair;
  const int64_t begin = a.first_token();
  for (int i = threadIdx.x; i < a.num_experts; i += kThreads) count_e[i] = 0;
  __syncthreads();
  for_each_pair<Pair>(
      static_cast<int>(a.last_token() - begin), a.top_k, [&](int t, int k) { return source.load_whole(begin + t, k); },
      [&](int t, int k, const Pair& pair) {
        source.unpack(begin + t, k, pair);
        if (const int expert = a.expert_here(pair.expert); expert >= 0) atomicAdd(&count_e[expert], 1);
      });
  __syncthreads();
  int32_t* out = a.counts_Be + static_cast<int64_t>(blockIdx.x) * a.num_experts;
  for (int i = threadIdx.x; i < a.num_experts; i += kThreads) out[i] = count_e[i];
}

// The tokens of each expert in a chunk, as a bit set. A token has an expert at most once, so the set bits below a
// token's own are the tokens before it.
struct TokenBits {
  uint64_t* words_we;
  int num_experts;

  __device__ void clear() const {
    for (int i = threadIdx.x; i < kWords * num_experts; i += kThreads) words_we[i] = 0;
  }
  __device__ void set(int token, int expert) const {  // the lower half of a word comes first
    atomicOr(reinterpret_cast<uint32_t*>(&words_we[token / 64 * num_experts + expert]) + token / 32 % 2,
             1u << token % 32);
  }
  // Returns the number of tokens of an expert before this one.
  __device__ int32_t count_before(int token, int expert) const {
    int32_t count = __popcll(words_we[token / 64 * num_experts + expert] & ((1ull << token % 64) - 1));
    for (int w = 0; w < token / 64; ++w) count += __popcll(words_we[w * num_experts + expert]);
    return count;
  }
  __device__ int32_t count(int expert) const {
    int32_t count = 0;
    for (int w = 0; w < kWords; ++w) count += __popcll(words_we[w * num_experts + expert]);
    return count;
  }
};

// Places the pairs of a block. The first block also writes the counts.
template <class Source>
__global__ void __launch_bounds__(kThreads) place_pairs_kernel(Index a, Source source) {
  extern __shared__ uint64_t shared[];
  const TokenBits tokens{shared, a.num_experts};
  int32_t* start_e = reinterpret_cast<int32_t*>(shared + kWords * a.num_experts);  // the next row of an expert
  int32_t *total_e = start_e + a.num_experts, *offset_e1 = total_e + a.num_experts;
  let_next_start();
  wait_for_inputs();
  using Pair = typename Source::Pair;
  sum_counts<kThreads>(a.counts_Be, a.num_blocks, a.num_experts, blockIdx.x, start_e, total_e);
  sum_totals<kThreads>(total_e, a.num_experts, INT32_MAX, offset_e1);
  for (int i = threadIdx.x; i < a.num_experts; i += kThreads) start_e[i] += offset_e1[i];
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i <= a.num_experts; i += kThreads) {
      a.offsets_e1[i] = offset_e1[i];
      if (a.counts_e != nullptr && i < a.num_experts) a.counts_e[i] = total_e[i];
    }
  }
  for (int64_t begin = a.first_token(); begin < a.last_token(); begin += kTokensOfChunk) {
    const auto num_tokens = static_cast<int>(min(int64_t{kTokensOfChunk}, a.last_token() - begin));
    const auto load = [&](int t, int k) { return source.load(begin + t, k); };
    tokens.clear();
    __syncthreads();
    for_each_pair<Pair>(num_tokens, a.top_k, load, [&](int t, int, const Pair& pair) {
      if (const int expert = a.expert_here(pair.expert); expert >= 0) tokens.set(t, expert);
    });
    __syncthreads();
    for_each_pair<Pair>(num_tokens, a.top_k, load, [&](int t, int k, const Pair& pair) {
      const int expert = a.expert_here(pair.expert);
      const int32_t row = expert < 0 ? -1 : start_e[expert] + tokens.count_before(t, expert);
      const int64_t place = (begin + t) * a.top_k + k;
      a.pair_row_TK[place] = row;
      if (row < 0) return;
      a.row_token_R[row] = static_cast<int32_t>(begin + t);
      if (a.row_pair_R != nullptr) a.row_pair_R[row] = static_cast<int32_t>(place);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < a.num_experts; i += kThreads) start_e[i] += tokens.count(i);
    __syncthreads();
  }
}

template <class Source>
void launch_index(Stream& s, const Index& a, const Source& source) {
  const auto e = static_cast<size_t>(a.num_experts);
  const LaunchShape counts{
      .blocks = static_cast<unsigned>(a.num_blocks), .threads = kThreads, .shared_bytes = e * sizeof(int32_t)};
  const LaunchShape places{.blocks = static_cast<unsigned>(std::max(1, a.num_blocks)),
                           .threads = kThreads,
                           .shared_bytes = kWords * e * sizeof(uint64_t) + (3 * e + 1) * sizeof(int32_t)};
  if (a.num_blocks > 0) launch_kernel(s, /*early=*/true, counts, count_pairs_kernel<Source>, a, source);
  launch_kernel(s, /*early=*/true, places, place_pairs_kernel<Source>, a, source);
}

// Returns the sum over the threads of a block, on all of them.
__device__ int32_t sum_of_block(int32_t x) {
  __shared__ int32_t warp_total[kArrivalThreads / 32];
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(0xffffffffu, x, width);
  if (threadIdx.x % 32 == 0) warp_total[threadIdx.x / 32] = x;
  __syncthreads();
  int32_t sum = 0;
  for (int w = 0; w < kArrivalThreads / 32; ++w) sum += warp_total[w];
  __syncthreads();
  return sum;
}

struct Arrivals {
  int32_t *offsets_e1, *arrival_R, *row_R;
  const int32_t* counts_WE;  // from the first expert here
  int num_ranks, num_experts, stride;
};

// A block owns the rows of one expert that come from one rank.
__global__ void __launch_bounds__(kArrivalThreads) index_arrivals_kernel(Arrivals a) {
  const int rank = blockIdx.x / a.num_experts, expert = blockIdx.x % a.num_experts;
  int32_t rows_before = 0, arrived_before = 0;  // sorted by expert; in the order of arrival
  for (int i = threadIdx.x; i < a.num_ranks * a.num_experts; i += kArrivalThreads) {
    const int q = i / a.num_experts, other = i % a.num_experts;
    const int32_t count = a.counts_WE[static_cast<int64_t>(q) * a.stride + other];
    if (other < expert || (other == expert && q < rank)) rows_before += count;
    if (q < rank || (q == rank && other < expert)) arrived_before += count;
  }
  const int32_t row = sum_of_block(rows_before), arrival = sum_of_block(arrived_before);
  const int32_t count = a.counts_WE[static_cast<int64_t>(rank) * a.stride + expert];
  for (int32_t i = threadIdx.x; i < count; i += kArrivalThreads) {
    a.arrival_R[row + i] = arrival + i;
    a.row_R[arrival + i] = row + i;
  }
  if (threadIdx.x != 0) return;
  if (rank == 0) a.offsets_e1[expert] = row;
  if (rank == a.num_ranks - 1 && expert == a.num_experts - 1) a.offsets_e1[a.num_experts] = row + count;
}

}  // namespace

void index_rows(Stream& s, const IndexRows& a) {
  const int64_t T = a.topk_TK.dim(0), e = a.offsets_e1.numel() - 1;
  const TokenBlocks blocks = index_blocks(T, e);
  launch_index(s,
               Index{.counts_e = a.counts_e.empty() ? nullptr : a.counts_e.ptr<int32_t>(),
                     .offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                     .row_token_R = a.row_token_R.ptr<int32_t>(),
                     .row_pair_R = a.row_pair_R.empty() ? nullptr : a.row_pair_R.ptr<int32_t>(),
                     .pair_row_TK = a.pair_row_TK.ptr<int32_t>(),
                     .counts_Be = static_cast<int32_t*>(a.scratch.data),
                     .num_tokens = T,
                     .tokens_of_block = blocks.tokens_of_block,
                     .num_blocks = narrow<int>(blocks.num_blocks),
                     .first_expert = narrow<int>(a.first_expert),
                     .num_experts = narrow<int>(e),
                     .top_k = narrow<int>(a.topk_TK.dim(1))},
               Choices{.topk_TK = a.topk_TK.ptr<int32_t>(),
                       .kept_TK = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>(),
                       .top_k = narrow<int>(a.topk_TK.dim(1))});
  check_launch("index_rows");
}

void index_routes(Stream& s, const IndexRoutes& a) {
  const int64_t N = a.pair_row_NL.dim(0), e = a.offsets_e1.numel() - 1;
  const TokenBlocks blocks = index_blocks(N, e);
  const int pairs_of_row = narrow<int>(a.pair_row_NL.dim(1));
  launch_index(s,
               Index{.counts_e = nullptr,
                     .offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                     .row_token_R = a.row_token_R.ptr<int32_t>(),
                     .row_pair_R = nullptr,
                     .pair_row_TK = a.pair_row_NL.ptr<int32_t>(),
                     .counts_Be = static_cast<int32_t*>(a.scratch.data),
                     .num_tokens = N,
                     .tokens_of_block = blocks.tokens_of_block,
                     .num_blocks = narrow<int>(blocks.num_blocks),
                     .first_expert = narrow<int>(a.first_expert),
                     .num_experts = narrow<int>(e),
                     .top_k = pairs_of_row},
               Routes{.routes_N2L = a.routes_N2L.ptr<int32_t>(),
                      .arrive_GV = a.arrive_GV.ptr<int32_t>(),
                      .weight_NL = a.weight_NL.ptr<float>(),
                      .rows_of_section = N / a.arrive_GV.dim(0),
                      .pairs_of_row = pairs_of_row,
                      .num_arrive = narrow<int>(a.arrive_GV.dim(1))});
  check_launch("index_routes");
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
  index_arrivals_kernel<<<blocks, kArrivalThreads, 0, cuda_stream(s)>>>(args);
  check_launch("index_arrivals");
}

}  // namespace moebius::cuda
