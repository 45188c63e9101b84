// The generic backward pass, in f32 arithmetic. One kernel sums dq over keys, and another sums dk and dv over query
// heads and queries, in order and without atomics. So scores are computed twice, and the order of every sum is fixed.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/cuda/attention_tiles.h"

namespace moebius::cuda {
namespace {

struct BwdPointers {
  float *dq, *dk, *dv;
  const float *dout, *o, *q, *k, *v;
  const float* lse;
  float* delta;  // [T, H], <do, o>
};

constexpr int kWarp = 32;

// A warp is a row of a head.
__global__ void __launch_bounds__(kThreads) delta_kernel(BwdPointers x, int64_t rows, int width) {
  const int64_t row = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarp;
  if (row >= rows) return;
  float sum = 0;
  for (int c = threadIdx.x % kWarp; c < width; c += kWarp) {
    sum += x.dout[row * width + c] * x.o[row * width + c];
  }
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % kWarp == 0) x.delta[row] = sum;
}

// A block is a tile of queries of one head of one sequence.
template <class Tile>
__global__ void __launch_bounds__(kThreads) dq_kernel(BwdPointers x, AttentionSizes z) {
  extern __shared__ __align__(16) float shared[];
  float *const q = shared, *const dout = q + Tile::kFloats, *const k = dout + Tile::kFloats,
               *const v = k + Tile::kFloats, *const ds = v + Tile::kFloats;
  __shared__ int begin_shared;
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide, h = blockIdx.y, kv_head = h / (z.heads / z.kv_heads);
  const int64_t b = blockIdx.z, row = int64_t{gridDim.x - 1 - blockIdx.x} * Tile::kRows;  // the longest first
  const int64_t end = row + Tile::kRows < z.rows ? row + Tile::kRows : z.rows, base = b * z.rows,
                kv_base = b * z.kv_rows, kv_end = last_key(z, end - 1) + 1;

  if (threadIdx.x == 0) begin_shared = 0x7fffffff;
  __syncthreads();
  if (threadIdx.x < end - row) atomicMin(&begin_shared, static_cast<int>(first_key(z, b, row + threadIdx.x)));
  load_rows<Tile>(q, x.q, base + row, base + end, z.heads, h, z.width);
  load_rows<Tile>(dout, x.dout, base + row, base + end, z.heads, h, z.v_width);
  __syncthreads();

  Sums<Tile> sums = {};
  int64_t first[Tile::kPer], last[Tile::kPer];
  float lse[Tile::kPer], delta[Tile::kPer];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    const int64_t r = row + ty + kSide * i;
    first[i] = r < end ? first_key(z, b, r) : 0;
    last[i] = r < end ? last_key(z, r) : -1;
    lse[i] = r < end ? x.lse[(base + r) * z.heads + h] : 0;
    delta[i] = r < end ? x.delta[(base + r) * z.heads + h] : 0;
  }
  for (int64_t key = begin_shared / Tile::kRows * Tile::kRows; key < kv_end; key += Tile::kRows) {
    load_rows<Tile>(k, x.k, kv_base + key, kv_base + kv_end, z.kv_heads, kv_head, z.width);
    load_rows<Tile>(v, x.v, kv_base + key, kv_base + kv_end, z.kv_heads, kv_head, z.v_width);
    __syncthreads();
    float scores[Tile::kPer][Tile::kPer], dp[Tile::kPer][Tile::kPer];
    dot_rows<Tile>(scores, q, k, z.width, ty, tx);
    dot_rows<Tile>(dp, dout, v, z.v_width, ty, tx);
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const int64_t at = key + tx + kSide * j;
        const bool seen = at >= first[i] && at <= last[i];
        const float d = seen ? z.scale * expf(z.scale * scores[i][j] - lse[i]) * (dp[i][j] - delta[i]) : 0.0f;
        ds[(ty + kSide * i) * Tile::kScorePitch + tx + kSide * j] = d;
      }
    }
    __syncthreads();
    add_weighted<Tile>(sums, ds, k, ty, tx);
    __syncthreads();
  }
  float one[Tile::kPer];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) one[i] = 1;
  store_rows<Tile>(x.dq, sums, one, base + row, base + end, z.heads, h, z.width, ty, tx);
}

// A block is a tile of keys of one kv head of one sequence; rows of its tiles of scores are keys.
template <class Tile>
__global__ void __launch_bounds__(kThreads) dkv_kernel(BwdPointers x, AttentionSizes z) {
  extern __shared__ __align__(16) float shared[];
  float *const k = shared, *const v = k + Tile::kFloats, *const q = v + Tile::kFloats, *const dout = q + Tile::kFloats,
               *const p = dout + Tile::kFloats, *const ds = p + Tile::kScoreFloats,
               *const lse = ds + Tile::kScoreFloats, *const delta = lse + Tile::kRows;
  __shared__ int first_shared[Tile::kRows];
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide, kv_head = blockIdx.y, group = z.heads / z.kv_heads;
  const int64_t b = blockIdx.z, key = int64_t{blockIdx.x} * Tile::kRows, base = b * z.rows, kv_base = b * z.kv_rows;
  const int64_t key_end = key + Tile::kRows < z.kv_rows ? key + Tile::kRows : z.kv_rows;
  const int64_t rows_begin = key > z.shift ? key - z.shift : 0, past_window = key_end - 1 + z.window - z.shift;
  const int64_t rows_end = z.window > 0 && past_window < z.rows ? past_window : z.rows;
  load_rows<Tile>(k, x.k, kv_base + key, kv_base + key_end, z.kv_heads, kv_head, z.width);
  load_rows<Tile>(v, x.v, kv_base + key, kv_base + key_end, z.kv_heads, kv_head, z.v_width);

  Sums<Tile> dk = {}, dv = {};
  for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t row = rows_begin; row < rows_end; row += Tile::kRows) {
      bool sees = false;
      if (threadIdx.x < Tile::kRows) {
        const int64_t r = row + threadIdx.x;
        const int64_t first = r < z.rows ? first_key(z, b, r) : z.kv_rows;
        first_shared[threadIdx.x] = static_cast<int>(first);
        sees = first < key_end;
        lse[threadIdx.x] = r < z.rows ? x.lse[(base + r) * z.heads + h] : 0;
        delta[threadIdx.x] = r < z.rows ? x.delta[(base + r) * z.heads + h] : 0;
      }
      if (!__syncthreads_or(sees)) continue;  // other documents
      load_rows<Tile>(q, x.q, base + row, base + z.rows, z.heads, h, z.width);
      load_rows<Tile>(dout, x.dout, base + row, base + z.rows, z.heads, h, z.v_width);
      __syncthreads();
      float scores[Tile::kPer][Tile::kPer], dp[Tile::kPer][Tile::kPer];
      dot_rows<Tile>(scores, k, q, z.width, ty, tx);
      dot_rows<Tile>(dp, v, dout, z.v_width, ty, tx);
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const int query = tx + kSide * j;
        const int first = first_shared[query];
#pragma unroll
        for (int i = 0; i < Tile::kPer; ++i) {
          const int64_t at = key + ty + kSide * i;
          const bool seen = at >= first && at <= z.shift + row + query;
          const float e = seen ? expf(z.scale * scores[i][j] - lse[query]) : 0.0f;
          const float d = seen ? z.scale * e * (dp[i][j] - delta[query]) : 0.0f;
          p[(ty + kSide * i) * Tile::kScorePitch + query] = e;
          ds[(ty + kSide * i) * Tile::kScorePitch + query] = d;
        }
      }
      __syncthreads();
      add_weighted<Tile>(dv, p, dout, ty, tx);
      add_weighted<Tile>(dk, ds, q, ty, tx);
      __syncthreads();
    }
  }
  float one[Tile::kPer];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) one[i] = 1;
  store_rows<Tile>(x.dk, dk, one, kv_base + key, kv_base + key_end, z.kv_heads, kv_head, z.width, ty, tx);
  store_rows<Tile>(x.dv, dv, one, kv_base + key, kv_base + key_end, z.kv_heads, kv_head, z.v_width, ty, tx);
}

template <class Tile>
constexpr int kDqBytes = (4 * Tile::kFloats + Tile::kScoreFloats) * sizeof(float);
template <class Tile>
constexpr int kDkvBytes = kDqBytes<Tile> + (Tile::kScoreFloats + 2 * Tile::kRows) * sizeof(float);

template <class Tile>
void launch(Stream& s, const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  const BwdPointers x{.dq = a.dq_THd.ptr<float>(),
                      .dk = a.dk_TGd.ptr<float>(),
                      .dv = a.dv_TGd.ptr<float>(),
                      .dout = a.do_THd.ptr<float>(),
                      .o = a.o_THd.ptr<float>(),
                      .q = a.q_THd.ptr<float>(),
                      .k = a.k_TGd.ptr<float>(),
                      .v = a.v_TGd.ptr<float>(),
                      .lse = a.lse_TH.ptr<float>(),
                      .delta = static_cast<float*>(a.scratch.data)};
  const cudaStream_t stream = cuda_stream(s);
  const int64_t delta_rows = a.lse_TH.numel();
  delta_kernel<<<static_cast<unsigned>(div_ceil(delta_rows * kWarp, kThreads)), kThreads, 0, stream>>>(x, delta_rows,
                                                                                                       z.v_width);
  check_launch("attention_bwd");
  MOEBIUS_CUDA(cudaFuncSetAttribute(dq_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kDqBytes<Tile>));
  MOEBIUS_CUDA(cudaFuncSetAttribute(dkv_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kDkvBytes<Tile>));
  const auto tiles = static_cast<unsigned>(div_ceil(z.rows, Tile::kRows)),
             kv_tiles = static_cast<unsigned>(div_ceil(z.kv_rows, Tile::kRows)), batch = static_cast<unsigned>(a.batch);
  dq_kernel<Tile><<<dim3(tiles, z.heads, batch), kThreads, kDqBytes<Tile>, stream>>>(x, z);
  check_launch("attention_bwd");
  dkv_kernel<Tile><<<dim3(kv_tiles, z.kv_heads, batch), kThreads, kDkvBytes<Tile>, stream>>>(x, z);
  check_launch("attention_bwd");
}

}  // namespace

void generic_attention_bwd(Stream& s, const AttentionBwd& a) {
  const int64_t width = std::max(a.q_THd.dim(2), a.v_TGd.dim(2));
  with_fitting_tile(
      s, width, [&]<class Tile>() { return kDkvBytes<Tile>; }, [&]<class Tile>() { launch<Tile>(s, a); });
}

}  // namespace moebius::cuda
