// The largest logit of each head (AttentionFwd::max_logit_H), apart from the forward pass: that keeps exponentials of
// scores, and some of its kernels are cuDNN's. The scores are recomputed, a third of the work of that pass or
// half of it. A block has a tile of queries of one head, and walks over the keys that they see.
#include <cuda_bf16.h>

#include "device/cuda/cuda.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/cuda/attention_tiles.h"
#include "ops/sm80/mma.h"

namespace moebius::cuda {
namespace {

// Raises *max to x. REQUIRES: *max is at least 0. Positive values have the order of their bits.
__device__ __forceinline__ void raise(float* max, float x) {
  if (x > 0) atomicMax(reinterpret_cast<int*>(max), __float_as_int(x));
}

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// The work of a block. Queries see keys from first_key() of the first one on, since documents begin in order.
struct Work {
  int head, kv_head;
  int64_t b, row, end, key, key_end;
};
template <int kQueries>
__device__ __forceinline__ Work work_of_block(const AttentionSizes& z) {
  const int head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z, row = int64_t{gridDim.x - 1 - blockIdx.x} * kQueries;  // the longest first
  const int64_t end = min(row + kQueries, z.rows);
  return {.head = head,
          .kv_head = head / (z.heads / z.kv_heads),
          .b = b,
          .row = row,
          .end = end,
          .key = first_key(z, b, row),
          .key_end = last_key(z, end - 1) + 1};
}

// f32, as in the generic forward pass.
template <class Tile>
__global__ void __launch_bounds__(kThreads)
    f32_kernel(float* max, const float* q_of_all, const float* k_of_all, AttentionSizes z) {
  __shared__ __align__(16) float q[Tile::kFloats], k[Tile::kFloats];
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  const Work w = work_of_block<Tile::kRows>(z);
  load_rows<Tile>(q, q_of_all, w.b * z.rows + w.row, w.b * z.rows + w.end, z.heads, w.head, z.width);
  float largest = 0;
  for (int64_t key = w.key; key < w.key_end; key += Tile::kRows) {
    load_rows<Tile>(k, k_of_all, w.b * z.kv_rows + key, w.b * z.kv_rows + w.key_end, z.kv_heads, w.kv_head, z.width);
    __syncthreads();
    float scores[Tile::kPer][Tile::kPer];
    dot_rows<Tile>(scores, q, k, z.width, ty, tx);
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      const int64_t r = w.row + ty + kSide * i;
      if (r >= w.end) continue;
      const int64_t first = first_key(z, w.b, r), last = last_key(z, r);
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const int64_t at = key + tx + kSide * j;
        if (at >= first && at <= last) largest = fmaxf(largest, z.scale * scores[i][j]);
      }
    }
    __syncthreads();
  }
  largest = max_of_warp(largest);
  if (threadIdx.x % 32 == 0) raise(max + w.head, largest);
}

constexpr int kWarps = 4, kQueries = 16 * kWarps, kPad = 8;  // elements after a row, so that 8 rows are in all banks

// Loads rows [row, row + kRows) below `end` of head h of x [., heads, width], with zeros after them and after `width`.
template <int kRows, int kWidth>
__device__ __forceinline__ void load_bf16_rows(__nv_bfloat16* to, const __nv_bfloat16* x, int64_t row, int64_t end,
                                               int heads, int h, int width, bool by_chunks) {
  constexpr int kChunks = kWidth / 8, kPitch = kWidth + kPad;
  for (int i = threadIdx.x; i < kRows * kChunks; i += 32 * kWarps) {
    const int r = i / kChunks, c = i % kChunks * 8;
    const __nv_bfloat16* from = x + ((row + r) * heads + h) * width + c;
    uint4 chunk{};
    if (row + r < end && by_chunks && c < width) chunk = *reinterpret_cast<const uint4*>(from);
    *reinterpret_cast<uint4*>(to + r * kPitch + c) = chunk;
    if (by_chunks || row + r >= end) continue;
    for (int e = 0; e < 8 && c + e < width; ++e) to[r * kPitch + c + e] = from[e];
  }
}

// bf16. A warp has 16 queries, and multiplies them with kKeys keys at a time.
template <int kWidth, int kKeys>
__global__ void __launch_bounds__(32 * kWarps)
    bf16_kernel(float* max, const __nv_bfloat16* q_of_all, const __nv_bfloat16* k_of_all, AttentionSizes z,
                bool by_chunks) {
  constexpr int kPitch = kWidth + kPad;
  __shared__ __align__(16) __nv_bfloat16 q[kQueries * kPitch], k[kKeys * kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Work w = work_of_block<kQueries>(z);
  load_bf16_rows<kQueries, kWidth>(q, q_of_all, w.b * z.rows + w.row, w.b * z.rows + w.end, z.heads, w.head, z.width,
                                   by_chunks);
  int64_t first[2], last[2];  // keys of this lane's two rows
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = w.row + 16 * warp + 8 * i + lane / 4;
    first[i] = r < w.end ? first_key(z, w.b, r) : 0;
    last[i] = r < w.end ? last_key(z, r) : -1;
  }
  // Matrices of 8 x 8: of q rows 0-7 and 8-15 of columns 0-7, then of 8-15; of k keys 0-7 of both, then 8-15.
  const auto address = [](const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); };
  const uint32_t q_at = address(q + (16 * warp + lane % 16) * kPitch + lane / 16 * 8);
  const uint32_t k_at = address(k + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8);
  float largest = 0;
  for (int64_t key = w.key; key < w.key_end; key += kKeys) {
    load_bf16_rows<kKeys, kWidth>(k, k_of_all, w.b * z.kv_rows + key, w.b * z.kv_rows + w.key_end, z.kv_heads,
                                  w.kv_head, z.width, by_chunks);
    __syncthreads();
    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < kWidth; c += 16) {
      uint32_t a[4];
      sm80::load_matrices<false>(a, q_at + c * 2);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        sm80::load_matrices<false>(b, k_at + (16 * n * kPitch + c) * 2);
        sm80::multiply(scores[2 * n], a, b[0], b[1]);
        sm80::multiply(scores[2 * n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t at = key + 8 * n + 2 * (lane % 4) + e % 2;
        if (at >= first[e / 2] && at <= last[e / 2]) largest = fmaxf(largest, z.scale * scores[n][e]);
      }
    }
    __syncthreads();
  }
  largest = max_of_warp(largest);
  if (lane == 0) raise(max + w.head, largest);
}

template <class Tile>
void launch_f32(Stream& s, const AttentionFwd& a, const AttentionSizes& z) {
  const dim3 grid(static_cast<unsigned>(div_ceil(z.rows, Tile::kRows)), z.heads, static_cast<unsigned>(a.batch));
  f32_kernel<Tile><<<grid, kThreads, 0, cuda_stream(s)>>>(a.max_logit_H.ptr<float>(), a.q_THd.ptr<float>(),
                                                          a.k_UGd.ptr<float>(), z);
}

template <int kWidth, int kKeys>
void launch_bf16(Stream& s, const AttentionFwd& a, const AttentionSizes& z) {
  const auto address = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
  const bool by_chunks = z.width % 8 == 0 && (address(a.q_THd) | address(a.k_UGd)) % 16 == 0;
  const dim3 grid(static_cast<unsigned>(div_ceil(z.rows, kQueries)), z.heads, static_cast<unsigned>(a.batch));
  bf16_kernel<kWidth, kKeys><<<grid, 32 * kWarps, 0, cuda_stream(s)>>>(
      a.max_logit_H.ptr<float>(), static_cast<const __nv_bfloat16*>(a.q_THd.data),
      static_cast<const __nv_bfloat16*>(a.k_UGd.data), z, by_chunks);
}

}  // namespace

void raise_max_logit(Stream& s, const AttentionFwd& a) {
  if (a.k_UGd.empty()) return;
  const AttentionSizes z = attention_sizes(a);
  if (a.q_THd.dtype == DType::f32) {
    if (z.width <= 64)
      launch_f32<TileShape<32, 1>>(s, a, z);
    else if (z.width <= 128)
      launch_f32<TileShape<32, 2>>(s, a, z);
    else
      launch_f32<TileShape<16, 4>>(s, a, z);
  } else if (z.width <= 64) {
    launch_bf16<64, 64>(s, a, z);
  } else if (z.width <= 128) {
    launch_bf16<128, 64>(s, a, z);
  } else if (z.width <= 192) {
    launch_bf16<192, 48>(s, a, z);
  } else {
    launch_bf16<256, 16>(s, a, z);
  }
  check_launch("attention_fwd");
}

}  // namespace moebius::cuda
