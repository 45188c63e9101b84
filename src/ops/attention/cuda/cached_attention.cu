#include "ops/attention/cached_attention.h"

#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/cuda/cached_pieces.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {
namespace {

using cached::Args;
using cached::BlockWork;
using cached::kMaxCluster;
using cached::kPieceKeys;
using cached::kThreads;
using cached::kVec;
using cached::RotatedRows;

constexpr int kMergedAtOnce = 128;  // pieces
constexpr int kFewRows = 4;         // up to which clusters merge: with more of them, not all blocks run at once
// Up to this many keys, a piece's heads are computed by more blocks: latency counts then, and L2 has all keys.
constexpr int64_t kFewKeys = 8192;

template <int kLanes, int kHeads, bool kAligned, class T>
__global__ void __launch_bounds__(kThreads) piece_kernel(Args<T> a) {
  const BlockWork<kHeads> w(a);
  let_next_start();
  wait_for_inputs();
  const int pos = a.pos[w.n];
  const int first = max(w.piece * kPieceKeys, a.first_seen(pos)), end = min((w.piece + 1) * kPieceKeys, pos + 1);
  if (first >= end) return;
  const int64_t at = a.part(w.n, w.h0, w.piece);
  RotatedRows<T> newest;
  compute_piece<kLanes, kHeads, kAligned>(a, newest, w.n, w.g, w.chunk, first, end,
                                          {.o = a.part_o + at * a.width,
                                           .max = a.part_max + at,
                                           .sum = a.part_sum + at,
                                           .next_o = int64_t{a.num_pieces} * a.width,
                                           .next = a.num_pieces});
}

template <int kLanes, int kHeads, bool kAligned, class T>
__global__ void __launch_bounds__(kThreads) merged_pieces_kernel(Args<T> a) {
  merged_pieces<kLanes, kHeads, kAligned>(a, RotatedRows<T>{});
}

// A block owns a head of a row, and merges its pieces in order.
template <class T>
__global__ void __launch_bounds__(kThreads) merge_pieces_kernel(Args<T> a) {
  constexpr int kColumns = 2;  // of a thread: heads are at most 256 wide
  __shared__ float shared[32], weight[kMergedAtOnce], part_sum[kMergedAtOnce];
  let_next_start();
  wait_for_inputs();
  const int head = blockIdx.x, n = blockIdx.y, pos = a.pos[n];
  const int begin = a.first_seen(pos) / kPieceKeys, end = pos / kPieceKeys + 1;
  float max = -INFINITY, sum = 0, o[kColumns] = {};
  for (int i = begin + threadIdx.x; i < end; i += kThreads) max = fmaxf(max, a.part_max[a.part(n, head, i)]);
  max = block_max(max, shared);
  for (int i0 = begin; i0 < end; i0 += kMergedAtOnce) {
    const int num = min(end - i0, kMergedAtOnce);
    __syncthreads();
    for (int i = threadIdx.x; i < num; i += kThreads) {
      weight[i] = expf(a.part_max[a.part(n, head, i0 + i)] - max);
      part_sum[i] = a.part_sum[a.part(n, head, i0 + i)];
    }
    __syncthreads();
    const float* part_o = a.part_o + a.part(n, head, i0) * a.width;
#pragma unroll 4
    for (int i = 0; i < num; ++i) {
      sum += weight[i] * part_sum[i];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int c = threadIdx.x + j * kThreads;
        if (c < a.width) o[j] += weight[i] * part_o[int64_t{i} * a.width + c];
      }
    }
  }
  const int64_t row = int64_t{n} * a.heads + head;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int c = threadIdx.x + j * kThreads;
    if (c < a.width) set(a.o[row * a.width + c], o[j] / sum);
  }
  if (threadIdx.x == 0) a.lse[row] = max + logf(sum);
}

template <int kLanes, bool kAligned, class T>
void launch_pieces(Stream& s, const Args<T>& a, int num_rows) {
  const int shared_by = a.heads / a.kv_heads;
  const auto with_heads = [&]<int kHeads>() {
    const dim3 grid(a.num_pieces, a.kv_heads * static_cast<int>(div_ceil(shared_by, kHeads)), num_rows);
    if constexpr (kAligned && kHeads <= 2) {
      if (a.num_pieces <= kMaxCluster && num_rows <= kFewRows && gpu_limits(s).is_hopper())
        return launch_clusters(s, true, {grid, kThreads}, static_cast<unsigned>(a.num_pieces),
                               merged_pieces_kernel<kLanes, kHeads, kAligned, T>, a);
    }
    launch_kernel(s, true, {grid, kThreads}, piece_kernel<kLanes, kHeads, kAligned, T>, a);
    launch_kernel(s, true, {dim3(a.heads, num_rows), kThreads}, merge_pieces_kernel<T>, a);
  };
  if (shared_by == 1) return with_heads.template operator()<1>();
  if (num_rows * a.max_tokens <= kFewKeys) return with_heads.template operator()<2>();
  if (shared_by <= 4) return with_heads.template operator()<4>();
  with_heads.template operator()<8>();
}

}  // namespace

void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a) {
  const int64_t N = a.q_NHd.dim(0), H = a.q_NHd.dim(1), d = a.q_NHd.dim(2), parts = N * H * num_cached_pieces(a);
  MOEBIUS_CHECK(usage, d <= 256, "cached_attention_fwd: expected heads of at most 256 on a GPU; got {}", d);
  with_float_type(a.q_NHd.dtype, [&]<class T>(T) {
    float* scratch = static_cast<float*>(a.scratch.data);
    const Args<T> x{.k = a.k_UGd.ptr<T>(),
                    .v = a.v_UGd.ptr<T>(),
                    .q = a.q_NHd.ptr<T>(),
                    .k_new = a.k_NGd.ptr<T>(),
                    .v_new = a.v_NGd.ptr<T>(),
                    .o = a.o_NHd.ptr<T>(),
                    .lse = a.lse_NH.ptr<float>(),
                    .pos = a.pos_N.ptr<int32_t>(),
                    .sequence = a.sequence_N.ptr<int32_t>(),
                    .part_o = scratch,
                    .part_max = scratch + parts * d,
                    .part_sum = scratch + parts * (d + 1),
                    .heads = narrow<int>(H),
                    .kv_heads = narrow<int>(a.k_UGd.dim(1)),
                    .width = narrow<int>(d),
                    .num_pieces = narrow<int>(num_cached_pieces(a)),
                    .max_tokens = a.max_tokens,
                    .window = std::min(a.window, a.max_tokens),
                    .scale = a.scale};
    const int rows = narrow<int>(N);
    const bool aligned = d % kVec == 0 && rows_are_aligned(d, sizeof(T), x.k, x.v, x.q, x.k_new, x.v_new);
    if (!aligned)
      launch_pieces<32, false>(s, x, rows);
    else if (d <= 64)
      launch_pieces<8, true>(s, x, rows);
    else if (d <= 128)
      launch_pieces<16, true>(s, x, rows);
    else
      launch_pieces<32, true>(s, x, rows);
  });
  check_launch("cached_attention_fwd");
}

}  // namespace moebius::cuda
