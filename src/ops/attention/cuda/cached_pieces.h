// Attention of one query of a sequence over the pieces of its cached keys: the code that the kernels of
// cached_attention.cu and of the attention of one token share.
#pragma once

#include <algorithm>

#include "ops/attention/attention_scratch.h"
#include "ops/cuda/cluster.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda::cached {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kPieceKeys = kCachedPieceKeys;
constexpr int kVec = 8;         // elements of a row that a thread holds
constexpr int kMaxCluster = 8;  // blocks: what every Hopper GPU has

template <class T>
struct Args {
  T *k, *v;
  const T *q, *k_new, *v_new;
  T* o;
  float* lse;
  const int32_t *pos, *sequence;
  float *part_o, *part_max, *part_sum;  // [N, H, pieces, d], [N, H, pieces] twice
  int heads, kv_heads, width, num_pieces;
  int64_t max_tokens, window;
  float scale;

  __device__ int first_seen(int p) const { return window > 0 ? max(0, p - static_cast<int>(window) + 1) : 0; }
  __device__ int64_t part(int n, int head, int piece) const { return (int64_t{n} * heads + head) * num_pieces + piece; }
};

// Elements [c, c + kVec) of a row, 0 outside of it.
template <bool kAligned, class T>
struct Piece {
  Raw<T, kVec> raw;
  __device__ __forceinline__ void fetch_from(const T* row, int c, int, bool valid) {
    raw = fetch<kVec>(row + c, valid);
  }
  __device__ __forceinline__ void get(float (&to)[kVec]) const { unpack<T>(to, raw); }
};
template <class T>
struct Piece<false, T> {
  float x[kVec];
  __device__ __forceinline__ void fetch_from(const T* row, int c, int width, bool valid) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = valid && c + i < width ? element(row[c + i]) : 0.0f;
  }
  __device__ __forceinline__ void get(float (&to)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = x[i];
  }
};

// Elements of a row in shared memory.
template <class T>
__device__ __forceinline__ Raw<T, kVec> fetch_shared(const T* p) {
  return *reinterpret_cast<const Raw<T, kVec>*>(p);
}

// Where the results of a block's heads go: those of its first head, and the distances to the next.
struct PartOf {
  float *o, *max, *sum;
  int64_t next_o, next;
};

// The query, key and value of the new token where an earlier kernel has left them.
template <class T>
struct RotatedRows {
  static constexpr bool kAreShared = false;
  __device__ __forceinline__ const T* v(const Args<T>& a, int n, int g) const {
    return a.v_new + (int64_t{n} * a.kv_heads + g) * a.width;
  }
};

// Turns the scores of each head into e^(score - max), a warp for each head, and stores max and sum of the exponentials.
template <int kHeads>
__device__ __forceinline__ void exponentiate(float (&score)[kHeads][kPieceKeys], int num_heads, int num_keys,
                                             const PartOf& part) {
  for (int r = threadIdx.x / 32; r < num_heads; r += kWarps) {
    float max = -INFINITY, sum = 0;
    for (int i = threadIdx.x % 32; i < num_keys; i += 32) max = fmaxf(max, score[r][i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
    for (int i = threadIdx.x % 32; i < num_keys; i += 32) sum += score[r][i] = expf(score[r][i] - max);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
      part.max[r * part.next] = max;
      part.sum[r * part.next] = sum;
    }
  }
}

// Adds what the threads have of the same columns, and stores it: first the rows of a warp, then the warps in order.
template <int kLanes, int kHeads>
__device__ __forceinline__ void add_rows(float (&sums)[kWarps][kHeads][kLanes * kVec], float (&out)[kHeads][kVec],
                                         int num_heads, int width, const PartOf& part) {
  const int c = threadIdx.x % kLanes * kVec;
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
#pragma unroll
      for (int step = 16; step >= kLanes; step /= 2) out[r][e] += __shfl_xor_sync(0xffffffffu, out[r][e], step);
      if (threadIdx.x % 32 < kLanes) sums[threadIdx.x / 32][r][c + e] = out[r][e];
    }
  }
  __syncthreads();
  for (int r = 0; r < num_heads; ++r) {
    float* to = part.o + r * part.next_o;
    for (int x = threadIdx.x; x < width; x += kThreads) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[w][r][x];
      to[x] = sum;
    }
  }
}

// A block computes up to kHeads query heads of one kv head over one piece of a sequence's keys, [first, end). kLanes
// threads hold a row of a key or a value; the others hold the next rows. newest: RotatedRows, or rows that it
// computes and leaves in shared memory, while the other rows are on their way.
template <int kLanes, int kHeads, bool kAligned, class T, class Newest>
__device__ __forceinline__ void compute_piece(const Args<T>& a, Newest& newest, int n, int g, int chunk, int first,
                                              int end, const PartOf& part) {
  constexpr int kRows = kThreads / kLanes, kAhead = std::min(kAligned ? 8 : 4, kPieceKeys / kRows);
  constexpr bool kIsOneRound = kRows * kAhead == kPieceKeys;  // then keys and values are all on their way at once
  __shared__ float score[kHeads][kPieceKeys];
  __shared__ float sums[kWarps][kHeads][kLanes * kVec];
  const int shared_by = a.heads / a.kv_heads, pos = a.pos[n];
  const int h0 = g * shared_by + chunk * kHeads, num_heads = min(kHeads, shared_by - chunk * kHeads);
  const int64_t base = int64_t{a.sequence[n]} * a.max_tokens;
  const T *k_new = nullptr, *v_new = newest.v(a, n, g);
  if constexpr (!Newest::kAreShared) k_new = a.k_new + (int64_t{n} * a.kv_heads + g) * a.width;
  const auto cached = [&](T* cache, int j) { return cache + ((base + j) * a.kv_heads + g) * a.width; };
  const auto store_newest = [&](const T* k) {
    if (chunk != 0 || end != pos + 1) return;
    for (int c = threadIdx.x; c < a.width; c += kThreads) {
      cached(a.k, pos)[c] = k[c];
      cached(a.v, pos)[c] = v_new[c];
    }
  };
  if constexpr (!Newest::kAreShared) store_newest(k_new);
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes, c = lane * kVec;
  const bool in_row = c < a.width;
  // Several rows of the keys, or of the values, from the piece's row i0 on, are on their way at once.
  using Ahead = Piece<kAligned, T>[kAhead];
  const auto fetch_rows = [&](Ahead& ahead, T* cache, const T* newest, int i0) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int j = first + i0 + u * kRows + row;
      bool valid = j < end && in_row;
      if constexpr (Newest::kAreShared) valid = valid && (j < pos || newest != nullptr);
      ahead[u].fetch_from(valid && j < pos ? cached(cache, j) : newest, in_row ? c : 0, a.width, valid);
    }
  };
  // Visits the piece's rows, of which the first are in `ahead`. The body gets the index in the piece, whether it is a
  // key, and its elements.
  const auto for_rows = [&](Ahead& ahead, T* cache, const T* newest, auto&& body) {
    for (int i0 = 0; i0 < end - first; i0 += kRows * kAhead) {
      if (i0 > 0) fetch_rows(ahead, cache, newest, i0);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (i0 + u * kRows >= end - first) break;  // for all threads of the block
        float x[kVec];
        ahead[u].get(x);
        const int i = i0 + u * kRows + row;
        body(i, first + i < end, x);
      }
    }
  };

  Ahead keys, values;
  fetch_rows(keys, a.k, k_new, 0);
  if constexpr (kIsOneRound) fetch_rows(values, a.v, v_new, 0);
  if constexpr (Newest::kAreShared) {
    static_assert(kIsOneRound && kAligned && Newest::kWidth == kLanes * kVec);
    newest.compute(a, n, pos);
    store_newest(newest.k);
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (first + u * kRows + row == pos && in_row) keys[u].raw = fetch_shared(newest.k + c);
  }
  float q[kHeads][kVec];
#pragma unroll
  for (int r = 0; r < kHeads; ++r) {
    if constexpr (Newest::kAreShared) {
      unpack<T>(q[r], fetch_shared(newest.q + r * kLanes * kVec + c));
    } else {
      Piece<kAligned, T> x;
      const bool valid = r < num_heads && in_row;
      x.fetch_from(a.q + (int64_t{n} * a.heads + (r < num_heads ? h0 + r : h0)) * a.width, in_row ? c : 0, a.width,
                   valid);
      x.get(q[r]);
    }
  }
  for_rows(keys, a.k, k_new, [&](int i, bool is_key, const float(&k)[kVec]) {
#pragma unroll
    for (int r = 0; r < kHeads; ++r) {
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum += q[r][e] * k[e];
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane == 0 && is_key) score[r][i] = sum * a.scale;
    }
  });
  __syncthreads();

  exponentiate(score, num_heads, end - first, part);
  __syncthreads();

  float out[kHeads][kVec] = {};
  if constexpr (!kIsOneRound) fetch_rows(values, a.v, v_new, 0);
  for_rows(values, a.v, v_new, [&](int i, bool is_key, const float(&v)[kVec]) {
    if (!is_key) return;
#pragma unroll
    for (int r = 0; r < kHeads; ++r) {
      const float p = r < num_heads ? score[r][i] : 0.0f;
#pragma unroll
      for (int e = 0; e < kVec; ++e) out[r][e] += p * v[e];
    }
  });
  add_rows<kLanes>(sums, out, num_heads, a.width, part);
}

// A block has a piece of a row's keys, and up to kHeads heads of one kv head.
template <int kHeads>
struct BlockWork {
  int piece, n, g, chunk, h0, num_heads;
  template <class T>
  __device__ explicit BlockWork(const Args<T>& a) : piece(blockIdx.x), n(blockIdx.z) {
    const int shared_by = a.heads / a.kv_heads, chunks = (shared_by + kHeads - 1) / kHeads;
    g = blockIdx.y / chunks;
    chunk = blockIdx.y % chunks;
    h0 = g * shared_by + chunk * kHeads;
    num_heads = min(kHeads, shared_by - chunk * kHeads);
  }
};

// Puts a block's keys and values of earlier passes on their way to the L2 cache. Their addresses are those of the
// position and the sequence in memory, which an earlier kernel may still change: then these are other rows of the
// cache. The reads are not kept in L1, where those after the wait would find old values (ops/cuda/early_launch.h).
template <int kHeads, class T>
__device__ __forceinline__ void prefetch_cache(const Args<T>& a, const BlockWork<kHeads>& w) {
  constexpr int kLine = 128 / int{sizeof(T)};
  const int lines = (a.width + kLine - 1) / kLine;
  const int64_t base = int64_t{__ldcg(a.sequence + w.n)} * a.max_tokens;
  const int pos = __ldcg(a.pos + w.n);
  const int first = max(w.piece * kPieceKeys, a.first_seen(pos)), end = min((w.piece + 1) * kPieceKeys, pos);
  for (int i = threadIdx.x; i < (end - first) * lines; i += kThreads) {
    const int64_t at = ((base + first + i / lines) * a.kv_heads + w.g) * a.width + i % lines * kLine;
    prefetch_line(a.k + at);
    prefetch_line(a.v + at);
  }
}

// The same where a cluster has all pieces of its heads: its blocks merge them from each other's shared memory, in
// order, with the bits of merge_pieces_kernel.
template <int kLanes, int kHeads, bool kAligned, class T, class Newest>
__device__ __forceinline__ void merged_pieces(const Args<T>& a, Newest newest) {
  constexpr int kWidth = kLanes * kVec;
  __shared__ float part_o[kHeads][kWidth], part_max[kHeads], part_sum[kHeads];
  const BlockWork<kHeads> w(a);
  let_next_start();
  prefetch_cache(a, w);
  if constexpr (Newest::kAreShared) newest.open(w.g, w.h0);
  wait_for_inputs();
  const int pos = a.pos[w.n];
  const int first = max(w.piece * kPieceKeys, a.first_seen(pos)), end = min((w.piece + 1) * kPieceKeys, pos + 1);
  if (first < end)
    compute_piece<kLanes, kHeads, kAligned>(
        a, newest, w.n, w.g, w.chunk, first, end,
        {.o = part_o[0], .max = part_max, .sum = part_sum, .next_o = kWidth, .next = 1});
  cluster_sync();
  const int begin_piece = a.first_seen(pos) / kPieceKeys, end_piece = pos / kPieceKeys + 1;
  for (int i = w.piece * kThreads + static_cast<int>(threadIdx.x); i < w.num_heads * a.width;
       i += a.num_pieces * kThreads) {
    const int r = i / a.width, c = i - r * a.width;
    float own_max[kMaxCluster], own_sum[kMaxCluster], own_o[kMaxCluster];
    float max = -INFINITY, sum = 0, o = 0;
#pragma unroll
    for (int p = 0; p < kMaxCluster; ++p) {
      const bool is_seen = begin_piece <= p && p < end_piece;
      own_max[p] = is_seen ? load_of_block(&part_max[r], p) : -INFINITY;
      own_sum[p] = is_seen ? load_of_block(&part_sum[r], p) : 0.0f;
      own_o[p] = is_seen ? load_of_block(&part_o[r][c], p) : 0.0f;
      max = fmaxf(max, own_max[p]);
    }
#pragma unroll
    for (int p = 0; p < kMaxCluster; ++p) {
      if (p < begin_piece || p >= end_piece) continue;
      const float weight = expf(own_max[p] - max);
      sum += weight * own_sum[p];
      o += weight * own_o[p];
    }
    const int64_t row = int64_t{w.n} * a.heads + w.h0 + r;
    set(a.o[row * a.width + c], o / sum);
    if (c == 0) a.lse[row] = max + logf(sum);
  }
  cluster_sync();  // the others have read this block's part
}

}  // namespace moebius::cuda::cached
