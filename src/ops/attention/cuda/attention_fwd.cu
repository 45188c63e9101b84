// The generic forward pass: any width up to 256, in f32 arithmetic.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/cuda/attention_tiles.h"

namespace moebius::cuda {
namespace {

struct FwdPointers {
  float* o;
  float* lse;
  const float *q, *k, *v;
};

// The running softmax of a thread's rows; the 16 threads of a row have the same values.
template <int kPer>
struct Running {
  float max[kPer], sum[kPer];
};

__device__ float max_of_row(float x) {
#pragma unroll
  for (int lane = kSide / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

__device__ float sum_of_row(float x) {
#pragma unroll
  for (int lane = kSide / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Adds a tile of scores (-inf for masked keys) to the running softmax. Probabilities relative to the new maximum are
// written to p, and the old sums are rescaled to it.
template <class Tile>
__device__ void take_scores(float (&scores)[Tile::kPer][Tile::kPer], Running<Tile::kPer>& run, Sums<Tile>& sums,
                            float* p, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    float tile_max = scores[i][0];
#pragma unroll
    for (int j = 1; j < Tile::kPer; ++j) tile_max = fmaxf(tile_max, scores[i][j]);
    const float new_max = fmaxf(run.max[i], max_of_row(tile_max));
    const float base = new_max == -INFINITY ? 0.0f : new_max;  // nothing seen yet
    float tile_sum = 0;
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) {
      const float e = expf(scores[i][j] - base);
      tile_sum += e;
      p[(ty + kSide * i) * Tile::kScorePitch + tx + kSide * j] = e;
    }
    const float correction = expf(run.max[i] - base);
    run.max[i] = new_max;
    run.sum[i] = run.sum[i] * correction + sum_of_row(tile_sum);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][chunk][e] *= correction;
    }
  }
}

// A block is a tile of queries of one head of one sequence.
template <class Tile>
__global__ void __launch_bounds__(kThreads) fwd_kernel(FwdPointers x, AttentionSizes z) {
  extern __shared__ __align__(16) float shared[];
  float *const q = shared, *const k = q + Tile::kFloats, *const v = k + Tile::kFloats, *const p = v + Tile::kFloats;
  __shared__ int begin_shared;
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide, h = blockIdx.y, kv_head = h / (z.heads / z.kv_heads);
  const int64_t b = blockIdx.z, row = int64_t{gridDim.x - 1 - blockIdx.x} * Tile::kRows;  // the longest first
  const int64_t end = row + Tile::kRows < z.rows ? row + Tile::kRows : z.rows;

  if (threadIdx.x == 0) begin_shared = 0x7fffffff;
  __syncthreads();
  if (threadIdx.x < end - row) atomicMin(&begin_shared, static_cast<int>(first_key(z, b, row + threadIdx.x)));
  load_rows<Tile>(q, x.q, b * z.rows + row, b * z.rows + end, z.heads, h, z.width);
  __syncthreads();

  Running<Tile::kPer> run;
  Sums<Tile> sums = {};
  int64_t first[Tile::kPer], last[Tile::kPer];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    run.max[i] = -INFINITY, run.sum[i] = 0;
    const int64_t r = row + ty + kSide * i;
    first[i] = r < end ? first_key(z, b, r) : 0;
    last[i] = r < end ? last_key(z, r) : -1;
  }
  const int64_t kv_end = last_key(z, end - 1) + 1;
  for (int64_t key = begin_shared / Tile::kRows * Tile::kRows; key < kv_end; key += Tile::kRows) {
    load_rows<Tile>(k, x.k, b * z.kv_rows + key, b * z.kv_rows + kv_end, z.kv_heads, kv_head, z.width);
    load_rows<Tile>(v, x.v, b * z.kv_rows + key, b * z.kv_rows + kv_end, z.kv_heads, kv_head, z.v_width);
    __syncthreads();
    float scores[Tile::kPer][Tile::kPer];
    dot_rows<Tile>(scores, q, k, z.width, ty, tx);
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const int64_t at = key + tx + kSide * j;
        scores[i][j] = at >= first[i] && at <= last[i] ? z.scale * scores[i][j] : -INFINITY;
      }
    }
    take_scores<Tile>(scores, run, sums, p, ty, tx);
    __syncthreads();
    add_weighted<Tile>(sums, p, v, ty, tx);
    __syncthreads();
  }

  float inverse[Tile::kPer];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    inverse[i] = run.sum[i] == 0 ? 0.0f : 1.0f / run.sum[i];  // 0: no key seen
    const int64_t r = row + ty + kSide * i;
    if (tx == 0 && r < end) x.lse[(b * z.rows + r) * z.heads + h] = run.max[i] + logf(run.sum[i]);
  }
  store_rows<Tile>(x.o, sums, inverse, b * z.rows + row, b * z.rows + end, z.heads, h, z.v_width, ty, tx);
}

template <class Tile>
constexpr int kSharedBytes = (3 * Tile::kFloats + Tile::kScoreFloats) * sizeof(float);

template <class Tile>
void launch(Stream& s, const AttentionFwd& a) {
  const AttentionSizes z = attention_sizes(a);
  MOEBIUS_CUDA(cudaFuncSetAttribute(fwd_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Tile>));
  const dim3 grid(static_cast<unsigned>(div_ceil(z.rows, Tile::kRows)), z.heads, static_cast<unsigned>(a.batch));
  fwd_kernel<Tile><<<grid, kThreads, kSharedBytes<Tile>, cuda_stream(s)>>>(
      {a.o_THd.ptr<float>(), a.lse_TH.ptr<float>(), a.q_THd.ptr<float>(), a.k_UGd.ptr<float>(), a.v_UGd.ptr<float>()},
      z);
  check_launch("attention_fwd");
}

}  // namespace

void generic_attention_fwd(Stream& s, const AttentionFwd& a) {
  const int64_t width = std::max(a.q_THd.dim(2), a.v_UGd.dim(2));
  with_fitting_tile(
      s, width, [&]<class Tile>() { return kSharedBytes<Tile>; }, [&]<class Tile>() { launch<Tile>(s, a); });
}

}  // namespace moebius::cuda
