// The pass of d_expert_down_quantised for sm_90a: from g and h the gradients of SwiGLU, and these quantised.
//
// A thread block has 128 rows of one expert by 128 columns of F, of g, of gate and of up. The rows begin where the
// transposed layout begins a block of 128 columns (core/quantized.h). A row is in 16 lanes, 8 columns in each, so that
// the scale of a row of dgate or dup is the largest of 16 lanes. Transposed results wait in shared memory, as bf16,
// and leave one after the other (ops/quantize/sm90/tile.h). Those of dgate and dup have a scale for each column, and
// that of sa has one for the whole block, of the largest of all threads.
#include <cuda_fp16.h>

#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/cuda/grid.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/d_expert_down_quantised.h"
#include "ops/experts/experts_backends.h"
#include "ops/experts/sm90/gated_formula.h"
#include "ops/quantize/sm90/tile.h"
#include "ops/sm90/copy.h"

namespace moebius::cuda {
namespace {

using sm90::kQuantizeTile;
using sm90::kTileLanes;
using sm90::kTilePitch;
using sm90::kTileWords;

constexpr int kThreads = 512, kWarps = kThreads / 32, kRowsOfWarp = kQuantizeTile / kWarps;
constexpr int kReads = kRowsOfWarp / 2;  // of two rows of a warp
constexpr int kTiles = 3;                // dgate, dup and sa
constexpr int kSharedBytes = kTiles * kTileWords * 4;

struct Problem {
  const uint16_t *g, *h;
  const uint8_t* packed;  // of the kernel with packed h
  int64_t packed_bytes;   // of a row of it
  const float* weight;
  const int32_t* offsets;
  int num_groups;
  int64_t R, F;
  uint16_t *dh, *sa;  // null: not wanted
  uint8_t* dh_rows;
  float* dh_scales;
  uint8_t *dh_columns, *sa_columns;  // of the kernel with columns
  float *dh_column_scales, *sa_column_scales;
  int64_t width;       // of a row of them
  float* partial;      // [F / 128, R]
  int64_t first_tile;  // of 128 rows, in the transposed layout: that of the first thread blocks
};

// 8 columns of a row, and their share of its <g, a>, without the row's weight.
struct Gradient {
  uint4 dgate, dup, sa;
  float product;
};

// Roundings are those of the epilogue of d_expert_down (sm90/d_gated_rows.h), which has the same backward pass.
__device__ __forceinline__ Gradient gradient_of(uint4 g, uint4 gate, uint4 up, float weight) {
  float z[8] = {low_bf16(gate.x), high_bf16(gate.x), low_bf16(gate.y), high_bf16(gate.y),
                low_bf16(gate.z), high_bf16(gate.z), low_bf16(gate.w), high_bf16(gate.w)};
  approximate_sigmoids(z);
  const SwigluFormula formula{};
  float product = 0;
  gated_backward(formula, gate.x, up.x, g.x, z[0], z[1], weight, product);
  gated_backward(formula, gate.y, up.y, g.y, z[2], z[3], weight, product);
  gated_backward(formula, gate.z, up.z, g.z, z[4], z[5], weight, product);
  gated_backward(formula, gate.w, up.w, g.w, z[6], z[7], weight, product);
  return {gate, up, g, product};
}

__device__ __forceinline__ uint4 load(const uint16_t* from) { return __ldcs(reinterpret_cast<const uint4*>(from)); }
__device__ __forceinline__ void store(uint16_t* to, const uint4& v) { *reinterpret_cast<uint4*>(to) = v; }

// The quantised row of dgate or dup that starts at `to`, from the lane's 8 columns.
__device__ __forceinline__ void store_row(const Problem& p, const uint4& v, int64_t row, int64_t col, bool is_there) {
  const sm90::TileScale scale = sm90::tile_scale(sm90::largest_of_row(sm90::largest_of(v)));
  if (!is_there) return;
  *reinterpret_cast<uint2*>(p.dh_rows + row * 2 * p.F + col) = sm90::pack_chunk(v, scale.inverse);
  if (col % kQuantizeTile == 0) p.dh_scales[row * (2 * p.F / kQuantizeTile) + col / kQuantizeTile] = scale.scale;
}

// Two E4M3 times their scale, in bf16.
__device__ __forceinline__ uint32_t values_of(uint32_t pair, float scale) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack_bf16(v.x * scale, v.y * scale);
}

// The 8 columns of a packed row that begin at col, in the block of 128 columns of that number.
__device__ __forceinline__ uint4 load_packed(const Problem& p, int64_t row, int64_t col, int64_t block) {
  const uint8_t* from = p.packed + row * p.packed_bytes;
  const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from + col));
  const float scale = __ldg(reinterpret_cast<const float*>(from + 2 * p.F) + block);
  return {values_of(v.x, scale), values_of(v.x >> 16, scale), values_of(v.y, scale), values_of(v.y >> 16, scale)};
}

// By a whole thread block, which has written `largest` of its warps: the largest of the block.
__device__ __forceinline__ uint32_t largest_of_warps(const uint32_t (&of_warps)[kWarps]) {
  uint32_t m = 0;
#pragma unroll
  for (const uint32_t of_warp : of_warps) m = max(m, of_warp);
  return m;
}

template <bool kColumns, bool kPacked>
__global__ void __launch_bounds__(kThreads, 2) d_gated_quantised_kernel(Problem p) {
  extern __shared__ __align__(16) uint32_t tiles[];
  const int64_t tile_row = p.first_tile + blockIdx.y, at = tile_row * kQuantizeTile,
                first_col = int64_t{blockIdx.x} * kQuantizeTile;
  const int group = sm90::group_of_columns(p.offsets, p.num_groups, at);
  const int64_t first = p.offsets[group] + at - group_begin(p.offsets[group], group);
  const auto rows =
      static_cast<int>(max(int64_t{0}, min(int64_t{kQuantizeTile}, int64_t{p.offsets[group + 1]} - first)));
  if (!kColumns && rows == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % kTileLanes;
  const int64_t col = first_col + chunk * 8;
  uint32_t largest_sa = 0;
#pragma unroll 2
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kTileLanes;
    const int64_t row = first + r;
    const bool is_there = r < rows;
    uint4 g{0, 0, 0, 0}, gate{0, 0, 0, 0}, up{0, 0, 0, 0};
    float weight = 0;
    if (is_there) {
      g = load(p.g + row * p.F + col);
      if constexpr (kPacked) {
        gate = load_packed(p, row, col, blockIdx.x);
        up = load_packed(p, row, p.F + col, gridDim.x + blockIdx.x);
      } else {
        gate = load(p.h + row * 2 * p.F + col);
        up = load(p.h + row * 2 * p.F + p.F + col);
      }
      weight = __ldg(p.weight + row);
    }
    Gradient d = gradient_of(g, gate, up, weight);
#pragma unroll
    for (int step = 1; step < kTileLanes; step *= 2) d.product += __shfl_xor_sync(~0u, d.product, step);
    if (is_there && chunk == 0) p.partial[blockIdx.x * p.R + row] = d.product;
    store_row(p, d.dgate, row, col, is_there);
    store_row(p, d.dup, row, p.F + col, is_there);
    if (p.dh != nullptr && is_there) {
      store(p.dh + row * 2 * p.F + col, d.dgate);
      store(p.dh + row * 2 * p.F + p.F + col, d.dup);
      store(p.sa + row * p.F + col, d.sa);
    }
    if constexpr (kColumns) {
      uint32_t* const to = tiles + r * kTilePitch + chunk * 4;
      *reinterpret_cast<uint4*>(to) = d.dgate;
      *reinterpret_cast<uint4*>(to + kTileWords) = d.dup;
      *reinterpret_cast<uint4*>(to + 2 * kTileWords) = d.sa;
      largest_sa = max(largest_sa, sm90::largest_of(d.sa));
    }
  }
  if constexpr (kColumns) {
    __shared__ uint32_t of_warps[kWarps];
    largest_sa = __reduce_max_sync(~0u, largest_sa);
    if (lane == 0) of_warps[warp] = largest_sa;
    __syncthreads();
    sm90::TileColumns to{.data = p.dh_columns,
                         .scales = p.dh_column_scales,
                         .width = p.width,
                         .scale_cols = p.width / kQuantizeTile,
                         .block = tile_row,
                         .cols = kQuantizeTile};
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile) {
      to.row = first_col + tile * p.F;
      sm90::store_columns<kThreads, false>(tiles + tile * kTileWords, to, 0);
    }
    to.data = p.sa_columns;
    to.scales = p.sa_column_scales;
    to.row = first_col;
    sm90::store_columns<kThreads, true>(tiles + 2 * kTileWords, to, largest_of_warps(of_warps));
  }
}

// dweight[r] = the sums of row r over 128 columns each, in order.
__global__ void add_partials_kernel(float* dweight, const float* partial, const int32_t* offsets, int num_experts,
                                    int64_t R, int64_t num_partials) {
  const int64_t r = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (r < offsets[0] || r >= offsets[num_experts]) return;
  float sum = 0;
  for (int64_t i = 0; i < num_partials; ++i) sum += partial[i * R + r];
  dweight[r] = sum;
}

}  // namespace

void d_gated_quantised(Stream& s, const DExpertDownQuantised& a) {
  const int64_t R = a.num_rows(), F = a.num_columns(), e = a.rows.offsets_e1.numel() - 1;
  const auto halves = [](const Tensor& t) { return static_cast<uint16_t*>(t.data); };
  const auto bytes = [](const Operand& q) { return static_cast<uint8_t*>(q.data.data); };
  const auto scales = [](const Operand& q) { return static_cast<float*>(q.scales.data); };
  Problem p{.g = halves(a.g_RF),
            .h = halves(a.h_R2F),
            .packed = static_cast<const uint8_t*>(a.h_rows_RB.data),
            .packed_bytes = a.is_packed() ? a.h_rows_RB.dim(1) : 0,
            .weight = static_cast<const float*>(a.weight_R.data),
            .offsets = a.rows.offsets_e1.ptr<int32_t>(),
            .num_groups = static_cast<int>(e),
            .R = R,
            .F = F,
            .dh = halves(a.dh_R2F),
            .sa = halves(a.sa_RF),
            .dh_rows = bytes(a.dh_rows),
            .dh_scales = scales(a.dh_rows),
            .dh_columns = bytes(a.dh_columns),
            .sa_columns = bytes(a.sa_columns),
            .dh_column_scales = scales(a.dh_columns),
            .sa_column_scales = scales(a.sa_columns),
            .width = padded_rows(R, e),
            .partial = static_cast<float*>(a.scratch.data)};
  const auto run = [&](auto kernel, int shared_bytes) {
    const int64_t tiles = p.width / kQuantizeTile;
    for (p.first_tile = 0; p.first_tile < tiles; p.first_tile += kMaxGridY) {
      const dim3 grid(static_cast<unsigned>(F / kQuantizeTile),
                      static_cast<unsigned>(std::min(kMaxGridY, tiles - p.first_tile)));
      kernel<<<grid, kThreads, shared_bytes, cuda_stream(s)>>>(p);
    }
  };
  if (a.has_columns()) {
    const auto kernel = a.is_packed() ? d_gated_quantised_kernel<true, true> : d_gated_quantised_kernel<true, false>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
               "d_expert_down_quantised");
    run(kernel, kSharedBytes);
  } else if (R > 0) {
    const auto kernel = a.is_packed() ? d_gated_quantised_kernel<false, true> : d_gated_quantised_kernel<false, false>;
    run(kernel, 0);
  }
  check_launch("d_expert_down_quantised");
  if (R == 0) return;
  constexpr int64_t kThreadsOfSums = 256;
  add_partials_kernel<<<static_cast<unsigned>(div_ceil(R, kThreadsOfSums)), kThreadsOfSums, 0, cuda_stream(s)>>>(
      a.dweight_R.ptr<float>(), p.partial, p.offsets, p.num_groups, R, F / kQuantizeTile);
  check_launch("d_expert_down_quantised");
}

}  // namespace moebius::cuda
