// Packs the routes of tokens into rows of messages, unpacks them, and writes routes into the windows of the ranks that
// have the experts.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/divisor.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/dispatch/cuda/windows.h"
#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kPushThreads = 512;

// A thread owns a pair.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(int32_t* routes, const int32_t* topk, const int32_t* kept, const float* weight, int64_t num_pairs,
                uint32_t top_k, int shift) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_pairs) return;
  const int64_t t = quotient(i, top_k), k = i - t * top_k;
  routes[t * 2 * top_k + k] = kept && kept[i] < 0 ? -1 : topk[i] + shift;
  routes[t * 2 * top_k + top_k + k] = __float_as_int(weight[i]);
}

__global__ void __launch_bounds__(kThreads)
    select_kernel(int32_t* topk, float* weight, const int32_t* routes, int64_t num_pairs, uint32_t top_k,
                  int first_expert, int num_experts) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_pairs) return;
  const int64_t at = i + quotient(i, top_k) * top_k;
  const int here = routes[at] - first_expert;
  topk[i] = here >= 0 && here < num_experts ? here : -1;
  weight[i] = __int_as_float(routes[at + top_k]);
}

struct PushPairs {
  const int32_t *topk_TK, *kept_TK;  // kept may be null
  const float* weight_TK;
  const int32_t *dest_TJ, *row_TJ;
  int64_t num_tokens;
  int tokens_of_block, etp, pairs_of_row;                  // pairs_of_row: L
  Divisor num_dest, top_k, experts_of_rank, words_of_row;  // words_of_row: 2 L over the numbers of a word
};

// The tokens of a block, in shared memory. The pairs of a token are sorted by rank, then by k.
struct PushBlock {
  int32_t* rank_tK;                               // by k: the ep rank of a pair; INT32_MAX if it is dropped
  int32_t *expert_tK, *weight_tK;                 // sorted
  int32_t *dest_tJ, *row_tJ, *begin_tJ, *end_tJ;  // of a destination: its rank and row, and its pairs among the sorted

  __device__ PushBlock(int32_t* shared, const PushPairs& a)
      : rank_tK(shared),
        expert_tK(rank_tK + a.tokens_of_block * a.top_k.value()),
        weight_tK(expert_tK + a.tokens_of_block * a.top_k.value()),
        dest_tJ(weight_tK + a.tokens_of_block * a.top_k.value()),
        row_tJ(dest_tJ + a.tokens_of_block * a.num_dest.value()),
        begin_tJ(row_tJ + a.tokens_of_block * a.num_dest.value()),
        end_tJ(begin_tJ + a.tokens_of_block * a.num_dest.value()) {}
  static int64_t ints_of_token(int64_t top_k, int64_t num_dest) { return 3 * top_k + 4 * num_dest; }
};

__device__ __forceinline__ void sort_pairs(const PushBlock& block, const PushPairs& a, int64_t first_pair, int num) {
  for (int i = threadIdx.x; i < num; i += kPushThreads) {
    const int first = a.top_k.quotient(i) * a.top_k.value(), rank = block.rank_tK[i];
    if (rank == INT32_MAX) continue;
    int place = first;
#pragma unroll 8
    for (int other = first; other < first + a.top_k.value(); ++other)
      place += block.rank_tK[other] < rank || (block.rank_tK[other] == rank && other < i) ? 1 : 0;
    block.expert_tK[place] = a.topk_TK[first_pair + i];
    block.weight_tK[place] = __float_as_int(a.weight_TK[first_pair + i]);
  }
}

// Returns the bytes that a thread's destinations send to other ranks.
__device__ __forceinline__ int64_t find_destinations(const PushBlock& block, const PushPairs& a, const Windows& to,
                                                     int64_t first_dest, int num) {
  int64_t rows = 0;
  for (int i = threadIdx.x; i < num; i += kPushThreads) {
    const int rank = a.dest_TJ[first_dest + i], first = a.num_dest.quotient(i) * a.top_k.value();
    int begin = first, end = first;
#pragma unroll 8
    for (int other = first; other < first + a.top_k.value(); ++other) {
      begin += block.rank_tK[other] < rank ? 1 : 0;
      end += block.rank_tK[other] <= rank ? 1 : 0;
    }
    block.dest_tJ[i] = rank;
    block.row_tJ[i] = a.row_TJ[first_dest + i];
    block.begin_tJ[i] = begin;
    block.end_tJ[i] = end;
    if (rank >= 0) rows += a.etp - (rank == to.rank / a.etp ? 1 : 0);
  }
  return rows * 2 * a.pairs_of_row * static_cast<int64_t>(sizeof(int32_t));
}

// A thread owns a word of a row, and writes it to all ranks of the row's destination: kNum experts or weights.
template <class Word>
__device__ __forceinline__ void push_words(const PushBlock& block, const PushPairs& a, const Windows& to, int num) {
  constexpr int kNum = sizeof(Word) / sizeof(int32_t);
  const int words_of_row = a.words_of_row.value();
  for (int i = threadIdx.x; i < num * words_of_row; i += kPushThreads) {
    const int dest = a.words_of_row.quotient(i), word = i - dest * words_of_row, rank = block.dest_tJ[dest];
    if (rank < 0) continue;
    union {
      Word word;
      int32_t number[kNum];
    } out;
#pragma unroll
    for (int n = 0; n < kNum; ++n) {
      const int column = word * kNum + n;
      const bool is_weight = column >= a.pairs_of_row;
      const int pair = block.begin_tJ[dest] + column - (is_weight ? a.pairs_of_row : 0);
      out.number[n] = is_weight ? 0 : -1;
      if (pair < block.end_tJ[dest]) out.number[n] = is_weight ? block.weight_tK[pair] : block.expert_tK[pair];
    }
    for (int q = rank * a.etp; q < (rank + 1) * a.etp; ++q)
      reinterpret_cast<Word*>(to.array(q))[int64_t{block.row_tJ[dest]} * words_of_row + word] = out.word;
  }
}

// A block owns some tokens. It sorts their pairs in shared memory, so that neighbours write neighbouring words.
template <class Word>
__global__ void __launch_bounds__(kPushThreads) push_routes_kernel(PushPairs a, Windows to) {
  extern __shared__ int32_t shared[];
  __shared__ long long sums[32];
  let_next_start();
  wait_for_inputs();
  const PushBlock block(shared, a);
  const int64_t first = int64_t{blockIdx.x} * a.tokens_of_block;
  const auto num_tokens = static_cast<int>(min(int64_t{a.tokens_of_block}, a.num_tokens - first));
  const int num_pairs = num_tokens * a.top_k.value();
  for (int i = threadIdx.x; i < num_pairs; i += kPushThreads) {
    const int64_t pair = first * a.top_k.value() + i;
    const int32_t kept = a.kept_TK != nullptr ? a.kept_TK[pair] : 0;
    block.rank_tK[i] = kept < 0 ? INT32_MAX : a.experts_of_rank.quotient(a.topk_TK[pair]);
  }
  __syncthreads();
  const int num_dest = num_tokens * a.num_dest.value();
  sort_pairs(block, a, first * a.top_k.value(), num_pairs);
  const int64_t sent = find_destinations(block, a, to, first * a.num_dest.value(), num_dest);
  __syncthreads();
  push_words<Word>(block, a, to, num_dest);
  const long long sent_by_block = block_sum(static_cast<long long>(sent), sums);
  if (threadIdx.x == 0 && sent_by_block > 0) atomicAdd(to.sent, static_cast<unsigned long long>(sent_by_block));
}

const int32_t* ints_or_null(const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); }

}  // namespace

void pack_routes(Stream& s, const PackRoutes& a) {
  const int64_t n = a.topk_TK.numel();
  pack_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.routes_T2K.ptr<int32_t>(), a.topk_TK.ptr<int32_t>(), ints_or_null(a.kept_TK), a.weight_TK.ptr<float>(), n,
      static_cast<uint32_t>(narrow<int>(a.topk_TK.dim(1))), narrow<int>(a.shift));
  check_launch("pack_routes");
}

void select_routes(Stream& s, const SelectRoutes& a) {
  const int64_t n = a.topk_NK.numel();
  select_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.topk_NK.ptr<int32_t>(), a.weight_NK.ptr<float>(), a.routes_N2K.ptr<int32_t>(), n,
      static_cast<uint32_t>(narrow<int>(a.topk_NK.dim(1))), narrow<int>(a.first_expert), narrow<int>(a.num_experts));
  check_launch("select_routes");
}

void push_routes(Stream& s, const PushRoutes& a) {
  const int64_t K = a.topk_TK.dim(1), J = a.dest_TJ.dim(1), L = std::min(K, a.experts_of_rank);
  // A row has 2 L numbers of 4 bytes, so words of 16 bytes fit if L is even. Windows begin at multiples of 16 bytes.
  const bool is_wide = L % 2 == 0 && a.offset % 16 == 0;
  const PushPairs push{.topk_TK = a.topk_TK.ptr<int32_t>(),
                       .kept_TK = ints_or_null(a.kept_TK),
                       .weight_TK = a.weight_TK.ptr<float>(),
                       .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                       .row_TJ = a.row_TJ.ptr<int32_t>(),
                       .num_tokens = a.topk_TK.dim(0),
                       .tokens_of_block = narrow<int>(std::max<int64_t>(1, kPushThreads / K)),
                       .etp = narrow<int>(a.etp),
                       .pairs_of_row = narrow<int>(L),
                       .num_dest = Divisor(J),
                       .top_k = Divisor(K),
                       .experts_of_rank = Divisor(a.experts_of_rank),
                       .words_of_row = Divisor(2 * L / (is_wide ? 4 : 2))};
  const int64_t ints = push.tokens_of_block * PushBlock::ints_of_token(K, J);
  const LaunchShape how{.blocks = static_cast<unsigned>(num_blocks(push.num_tokens, push.tokens_of_block)),
                        .threads = kPushThreads,
                        .shared_bytes = static_cast<size_t>(ints) * sizeof(int32_t)};
  const Windows to = windows_of(a.sent_1, a.bases_W, a.offset, a.rank);
  if (is_wide)
    launch_kernel(s, /*early=*/true, how, push_routes_kernel<uint4>, push, to);
  else
    launch_kernel(s, /*early=*/true, how, push_routes_kernel<uint2>, push, to);
  check_launch("push_routes");
}

}  // namespace moebius::cuda
