// Computes the places to which rows are sent and returned from the counts of all ranks, sums the values that returned
// for pairs, and divides rows into parts.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/divisor.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
struct Places {
  int32_t *row_TJ, *back_row_TB, *arrive_W1, *back_W;
  const int32_t *dest_TJ, *slot_TJ, *counts_WP;
  int64_t num;  // T J
  int num_ranks, num_ep, etp, rank;
};

// A thread owns a destination of a token. The first block also writes the results of each rank.
__global__ void __launch_bounds__(kThreads) places_kernel(Places a) {
  extern __shared__ int32_t shared[];
  let_next_start();
  wait_for_inputs();
  // Where this rank's rows for ep rank p begin in the window of p, and where the rows that return from p begin here.
  int32_t *there = shared, *here = shared + a.num_ep;
  const int32_t* mine = a.counts_WP + a.rank * a.num_ep;
  for (int p = threadIdx.x; p < a.num_ep; p += kThreads) {
    int32_t before = 0, returned = 0;
    for (int q = 0; q < a.rank; ++q) before += a.counts_WP[q * a.num_ep + p];
    for (int other = 0; other < p; ++other) returned += mine[other];
    there[p] = before;
    here[p] = a.etp * returned;
  }
  const int ep = a.rank / a.etp;
  for (int q = threadIdx.x; q <= a.num_ranks && blockIdx.x == 0; q += kThreads) {
    int32_t before = 0, returned = 0;
    for (int other = 0; other < q; ++other) before += a.counts_WP[other * a.num_ep + ep];
    a.arrive_W1[q] = before;
    if (q == a.num_ranks) break;
    const int32_t* of_rank = a.counts_WP + q * a.num_ep;
    for (int p = 0; p < ep; ++p) returned += of_rank[p];
    a.back_W[q] = a.etp * returned + a.rank % a.etp * of_rank[ep];
  }
  __syncthreads();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.num) return;
  const int p = a.dest_TJ[i], slot = a.slot_TJ[i];
  a.row_TJ[i] = p < 0 ? -1 : there[p] + slot;
  for (int copy = 0; copy < a.etp; ++copy)
    a.back_row_TB[i * a.etp + copy] = p < 0 ? -1 : here[p] + copy * mine[p] + slot;
}

struct Contiguous {
  int32_t *dest_TJ, *row_TJ, *back_row_TB, *arrive_W1, *back_W;
  int64_t num_tokens;
  int num_ep, num_ranks, rank;
};

// A thread owns a token. The first block also writes the results of each rank.
__global__ void __launch_bounds__(kThreads) contiguous_places_kernel(Contiguous a) {
  const int64_t T = a.num_tokens, t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int q = threadIdx.x; q <= a.num_ranks && blockIdx.x == 0; q += kThreads) {
    a.arrive_W1[q] = static_cast<int32_t>(q * T);
    if (q < a.num_ranks) a.back_W[q] = static_cast<int32_t>(a.rank * T);
  }
  if (t >= T) return;
  for (int j = 0; j < a.num_ep; ++j) {
    a.dest_TJ[t * a.num_ep + j] = j;
    a.row_TJ[t * a.num_ep + j] = static_cast<int32_t>(a.rank * T + t);
  }
  for (int q = 0; q < a.num_ranks; ++q) a.back_row_TB[t * a.num_ranks + q] = static_cast<int32_t>(q * T + t);
}

struct Sorted {
  int32_t* row_GTJ;
  const int32_t *dest_TJ, *slot_TJ, *count_P;
  int64_t num;  // T J
  int num_blocks, num_ranks, last, section;
};

// A thread owns a destination of a token.
__global__ void __launch_bounds__(kThreads) sorted_places_kernel(Sorted a) {
  extern __shared__ int32_t first[];
  for (int p = threadIdx.x; p < a.num_ranks; p += kThreads) {
    int32_t before = 0;
    for (int q = 0; q < a.num_ranks; ++q)
      if (q != a.last && (q < p || p == a.last) && q != p) before += a.section > 0 ? a.section : a.count_P[q];
    first[p] = before;
  }
  __syncthreads();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= a.num) return;
  const int p = a.dest_TJ[i], of_block = a.num_ranks / a.num_blocks;
  for (int g = 0; g < a.num_blocks; ++g)
    a.row_GTJ[g * a.num + i] = p >= 0 && p / of_block == g ? first[p] + a.slot_TJ[i] : -1;
}

struct ReturnedPairs {
  float* to_TK;
  const float* from_BL;
  const int32_t *topk_TK, *kept_TK, *dest_TJ, *back_row_TB;
  int64_t num_pairs;  // T K
  uint32_t top_k;
  int num_dest, etp, pairs_of_row;  // J, ETP, L
  Divisor experts_of_rank;          // E/P
};

// A thread owns a pair. The destinations of a token ascend, so those below the pair's rank come before it.
__global__ void __launch_bounds__(kThreads) sum_pairs_kernel(ReturnedPairs a) {
  const int64_t pair = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (pair >= a.num_pairs) return;
  const int64_t t = quotient(pair, a.top_k);
  const auto is_kept = [&](int64_t i) { return a.kept_TK == nullptr || a.kept_TK[i] >= 0; };
  float sum = 0;
  if (is_kept(pair)) {
    const int p = a.experts_of_rank.quotient(a.topk_TK[pair]), num_experts = a.experts_of_rank.value();
    int j = 0, l = 0;
#pragma unroll 8
    for (int i = 0; i < a.num_dest; ++i) {
      const int32_t dest = a.dest_TJ[t * a.num_dest + i];
      j += dest >= 0 && dest < p ? 1 : 0;
    }
#pragma unroll 8
    for (int64_t i = t * a.top_k; i < pair; ++i) {
      const auto here = static_cast<uint32_t>(a.topk_TK[i] - p * num_experts);
      l += here < static_cast<uint32_t>(num_experts) && is_kept(i) ? 1 : 0;
    }
    const int32_t* rows = a.back_row_TB + (t * a.num_dest + j) * a.etp;
    for (int i = 0; i < a.etp; ++i) sum += a.from_BL[int64_t{rows[i]} * a.pairs_of_row + l];
  }
  a.to_TK[pair] = sum;
}

struct Parts {
  int32_t *own_2e, *near_22e, *far_22e, *own_token_R;  // near may be null
  const int32_t *offsets_e1, *row_token_R, *arrive_W1, *dest_TJ, *row_TJ, *pair_row_NL;
  int64_t num;  // T J
  int num_experts, num_dest, pairs_of_row, rank, num_ranks, far_from, ep;
};

// Returns the first row of [begin, end) that reads row n or a later one.
__device__ int32_t first_from(const int32_t* row_token, int32_t begin, int32_t end, int32_t n) {
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if (row_token[middle] < n)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// Writes the two runs of the rows of expert i at the distances `of`.
__device__ void write_runs(const Parts& a, int32_t* runs_22e, int i, const RowDistances& of) {
  const int32_t begin = a.offsets_e1[i], end = a.offsets_e1[i + 1];
  const auto first_of = [&](int64_t rank) { return first_from(a.row_token_R, begin, end, a.arrive_W1[rank]); };
  int32_t *begins = runs_22e + 2 * i, *ends = begins + 2 * a.num_experts;
  begins[0] = begins[1] = ends[0] = ends[1] = end;
  if (of.count(a.num_ranks) == 0) return;
  const SourceRanks from = source_ranks(of, a.rank, a.num_ranks);
  begins[0] = from.wraps() ? begin : first_of(from.first);
  ends[0] = first_of(from.last + 1);
  if (from.wraps()) begins[1] = first_of(from.first);
}

// Each of the first threads owns an expert, and each of the others a destination of a token.
__global__ void __launch_bounds__(kThreads) part_rows_kernel(Parts a) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread < a.num_experts) {
    const auto i = static_cast<int>(thread);
    const int32_t begin = a.offsets_e1[i], end = a.offsets_e1[i + 1];
    a.own_2e[i] = first_from(a.row_token_R, begin, end, a.arrive_W1[a.rank]);
    a.own_2e[a.num_experts + i] = first_from(a.row_token_R, begin, end, a.arrive_W1[a.rank + 1]);
    if (a.near_22e) write_runs(a, a.near_22e, i, {.first = 1, .end = a.far_from});
    write_runs(a, a.far_22e, i, {.first = a.far_from});
    return;
  }
  const int64_t i = thread - a.num_experts;
  if (i >= a.num || a.dest_TJ[i] != a.ep) return;
  for (int l = 0; l < a.pairs_of_row; ++l) {
    const int32_t r = a.pair_row_NL[int64_t{a.row_TJ[i]} * a.pairs_of_row + l];
    if (r >= 0) a.own_token_R[r] = static_cast<int32_t>(quotient(i, a.num_dest));
  }
}

const int32_t* ints_or_null(const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); }

}  // namespace

void dispatch_places(Stream& s, const DispatchPlaces& a) {
  const Places places{.row_TJ = a.row_TJ.ptr<int32_t>(),
                      .back_row_TB = a.back_row_TB.ptr<int32_t>(),
                      .arrive_W1 = a.arrive_W1.ptr<int32_t>(),
                      .back_W = a.back_W.ptr<int32_t>(),
                      .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                      .slot_TJ = a.slot_TJ.ptr<int32_t>(),
                      .counts_WP = a.counts_WP.ptr<int32_t>(),
                      .num = a.dest_TJ.numel(),
                      .num_ranks = narrow<int>(a.counts_WP.dim(0)),
                      .num_ep = narrow<int>(a.counts_WP.dim(1)),
                      .etp = narrow<int>(a.counts_WP.dim(0) / a.counts_WP.dim(1)),
                      .rank = narrow<int>(a.rank)};
  const int blocks = std::max(1, num_blocks(places.num, kThreads));
  const LaunchShape how{.blocks = static_cast<unsigned>(blocks),
                        .threads = kThreads,
                        .shared_bytes = 2 * places.num_ep * sizeof(int32_t)};
  launch_kernel(s, /*early=*/true, how, places_kernel, places);
  check_launch("dispatch_places");
}

void contiguous_places(Stream& s, const ContiguousPlaces& a) {
  const Contiguous places{.dest_TJ = a.dest_TJ.ptr<int32_t>(),
                          .row_TJ = a.row_TJ.ptr<int32_t>(),
                          .back_row_TB = a.back_row_TB.ptr<int32_t>(),
                          .arrive_W1 = a.arrive_W1.ptr<int32_t>(),
                          .back_W = a.back_W.ptr<int32_t>(),
                          .num_tokens = a.dest_TJ.dim(0),
                          .num_ep = narrow<int>(a.dest_TJ.dim(1)),
                          .num_ranks = narrow<int>(a.back_W.numel()),
                          .rank = narrow<int>(a.rank)};
  contiguous_places_kernel<<<std::max(1, num_blocks(places.num_tokens, kThreads)), kThreads, 0, cuda_stream(s)>>>(
      places);
  check_launch("contiguous_places");
}

void sorted_places(Stream& s, const SortedPlaces& a) {
  const Sorted sorted{.row_GTJ = a.row_GTJ.ptr<int32_t>(),
                      .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                      .slot_TJ = a.slot_TJ.ptr<int32_t>(),
                      .count_P = a.count_P.ptr<int32_t>(),
                      .num = a.dest_TJ.numel(),
                      .num_blocks = narrow<int>(a.row_GTJ.dim(0)),
                      .num_ranks = narrow<int>(a.count_P.numel()),
                      .last = narrow<int>(a.last),
                      .section = narrow<int>(a.section)};
  const size_t shared_bytes = sorted.num_ranks * sizeof(int32_t);
  sorted_places_kernel<<<num_blocks(sorted.num, kThreads), kThreads, shared_bytes, cuda_stream(s)>>>(sorted);
  check_launch("sorted_places");
}

void sum_pairs(Stream& s, const SumPairs& a) {
  const ReturnedPairs pairs{.to_TK = a.to_TK.ptr<float>(),
                            .from_BL = a.from_BL.ptr<float>(),
                            .topk_TK = a.topk_TK.ptr<int32_t>(),
                            .kept_TK = ints_or_null(a.kept_TK),
                            .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                            .back_row_TB = a.back_row_TB.ptr<int32_t>(),
                            .num_pairs = a.to_TK.numel(),
                            .top_k = static_cast<uint32_t>(narrow<int>(a.topk_TK.dim(1))),
                            .num_dest = narrow<int>(a.dest_TJ.dim(1)),
                            .etp = narrow<int>(a.back_row_TB.dim(1) / a.dest_TJ.dim(1)),
                            .pairs_of_row = narrow<int>(a.from_BL.dim(1)),
                            .experts_of_rank = Divisor(a.experts_of_rank)};
  sum_pairs_kernel<<<num_blocks(pairs.num_pairs, kThreads), kThreads, 0, cuda_stream(s)>>>(pairs);
  check_launch("sum_pairs");
}

void part_rows(Stream& s, const PartRows& a) {
  const Parts parts{.own_2e = a.own_2e.ptr<int32_t>(),
                    .near_22e = a.far_from > 1 ? a.near_22e.ptr<int32_t>() : nullptr,
                    .far_22e = a.far_22e.ptr<int32_t>(),
                    .own_token_R = a.own_token_R.ptr<int32_t>(),
                    .offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                    .row_token_R = a.row_token_R.ptr<int32_t>(),
                    .arrive_W1 = a.arrive_W1.ptr<int32_t>(),
                    .dest_TJ = a.dest_TJ.ptr<int32_t>(),
                    .row_TJ = a.row_TJ.ptr<int32_t>(),
                    .pair_row_NL = a.pair_row_NL.ptr<int32_t>(),
                    .num = a.dest_TJ.numel(),
                    .num_experts = narrow<int>(a.offsets_e1.numel() - 1),
                    .num_dest = narrow<int>(a.dest_TJ.dim(1)),
                    .pairs_of_row = narrow<int>(a.pair_row_NL.dim(1)),
                    .rank = narrow<int>(a.rank),
                    .num_ranks = narrow<int>(a.arrive_W1.numel() - 1),
                    .far_from = narrow<int>(a.far_from),
                    .ep = narrow<int>(a.rank / a.etp)};
  part_rows_kernel<<<num_blocks(parts.num_experts + parts.num, kThreads), kThreads, 0, cuda_stream(s)>>>(parts);
  check_launch("part_rows");
}

}  // namespace moebius::cuda
