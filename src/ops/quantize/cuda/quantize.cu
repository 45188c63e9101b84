// A thread block quantises a tile (tile.h), and writes q.data row by row.
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/cuda/stats.h"
#include "ops/quantize/cuda/tile.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/quantize/scales.h"
#include "ops/quantize/sm90/quantize_tiles.h"

namespace moebius::cuda {
namespace {

using quantize_tile::is_negative;
using quantize_tile::kOfLane;
using quantize_tile::kRowsOfWarp;
using quantize_tile::kThreads;
using quantize_tile::kTile;
using quantize_tile::kWarps;
using quantize_tile::launch;
using quantize_tile::load_tile;
using quantize_tile::Place;
using quantize_tile::place_of;
using quantize_tile::Problem;
using quantize_tile::problem_of;
using quantize_tile::row_of;
using quantize_tile::scale_of;
using quantize_tile::value_of;

struct Draws {
  DeviceRng rng;
  const int64_t* draw;  // null: to nearest even
  int64_t first_group, num_groups;
};

__device__ uint32_t largest_of(const float (&v)[kOfLane]) {
  uint32_t m = 0;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) m = max(m, __float_as_uint(v[j]) & 0x7fffffffu);
  return m;
}

__device__ uint32_t largest_of_lanes(uint32_t m, int lanes) {
  for (int step = 1; step < lanes; step *= 2) m = max(m, __shfl_xor_sync(~0u, m, step));
  return m;
}

// The largest magnitude of the whole tile.
__device__ uint32_t largest_of_tile(const float* tile, const Problem& p) {
  __shared__ uint32_t shared;
  if (threadIdx.x == 0) shared = 0;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t m = 0;
  for (int i = warp * kRowsOfWarp; i < (warp + 1) * kRowsOfWarp; ++i) {
    float v[kOfLane];
    row_of(v, tile, p, i, lane);
    m = max(m, largest_of(v));
  }
  atomicMax(&shared, m);
  __syncthreads();
  return shared;
}

template <class T>
__global__ void __launch_bounds__(kThreads) largest_kernel(Problem p, uint32_t* largest) {
  extern __shared__ float tile[];
  const Place t = place_of(p);
  if (t.rows == 0) return;
  load_tile<T>(tile, p, t);
  const uint32_t m = largest_of_tile(tile, p);
  if (threadIdx.x == 0) atomicMax(largest + t.matrix, m);
}

// Stores the largest magnitude of each matrix on all ranks. magnitudes: of the first rank and the first matrix; the
// next rank's are `stride` after.
__global__ void largest_of_ranks_kernel(uint32_t* of, const int32_t* magnitudes, int64_t n, int64_t stride,
                                        int num_ranks) {
  const int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (e >= n) return;
  int32_t largest = 0;
  for (int r = 0; r < num_ranks; ++r) largest = max(largest, magnitudes[r * stride + e]);
  of[e] = static_cast<uint32_t>(largest);
}

// Turns the largest magnitudes into the scales of whole matrices.
__global__ void matrix_scales_kernel(float* scales, int64_t n, bool is_nv, DType element) {
  const int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (e >= n) return;
  const uint32_t m = __float_as_uint(scales[e]);
  scales[e] = is_nv ? 1.0f / nv_encode_scale(m) : power_of_two_scale(m, top_exponent(element));
}

// Stores the scale of the block that has the element (i, j) of the tile, and gives what its elements
// are multiplied with.
__device__ float store_scale(const Problem& p, const Place& t, int i, int j, uint32_t m, bool stores) {
  const int64_t row = t.row + i, col = t.col + j;
  const auto at = [&](int64_t down, int64_t across) {
    const int64_t rows = (p.rows + down - 1) / down, cols = (p.cols + across - 1) / across;
    return (t.matrix * rows + row / down) * cols + col / across;
  };
  if (p.layout == ScaleLayout::per_tensor) {
    const uint32_t of_matrix = __float_as_uint(static_cast<float*>(p.scales)[t.matrix]);
    return 1.0f / power_of_two_scale(of_matrix, top_exponent(p.format));
  }
  if (p.layout == ScaleLayout::nv_blocks) {
    const float encode = nv_encode_scale(__float_as_uint(p.tensor_scale[t.matrix]));
    const f8_e4m3 scale = nv_block_scale(m, encode);
    if (stores) static_cast<uint8_t*>(p.scales)[at(1, 16)] = scale.bits;
    return nv_inverse(scale, 1.0f / encode);
  }
  const float scale = power_of_two_scale(m, top_exponent(p.format));
  if (stores && p.layout == ScaleLayout::mx_blocks) static_cast<uint8_t*>(p.scales)[at(1, 32)] = to_e8m0(scale).bits;
  if (stores && p.layout == ScaleLayout::row_blocks) static_cast<float*>(p.scales)[at(1, kTile)] = scale;
  if (stores && p.layout == ScaleLayout::square_blocks) static_cast<float*>(p.scales)[at(kTile, kTile)] = scale;
  return 1.0f / scale;
}

// The index of the draw of element (i, j).
__device__ uint64_t draw_index(const Problem& p, const Place& t, const Draws& draws, int i, int j) {
  const int64_t r = p.transposed ? t.begin + j : t.row + i, col = p.transposed ? t.row + i : t.col + j;
  if (p.transposed && j >= t.filled) return static_cast<uint64_t>(col);  // padding: as on the CPU, row 0
  int64_t group = p.transposed ? t.group : 0;
  if (p.offsets && !p.transposed) {
    while (r >= p.offsets[group + 1]) ++group;
  }
  const int64_t row = draws.draw[1] + r - (p.offsets ? p.offsets[group] : 0);
  return static_cast<uint64_t>((row * draws.num_groups + draws.first_group + group + t.matrix) * p.x_cols + col);
}

__device__ void store_elements(const Problem& p, const Place& t, const Draws& draws, const float (&v)[kOfLane], int i,
                               int lane, float inverse) {
  const int64_t first = (t.matrix * p.rows + t.row + i) * p.cols + t.col + lane * kOfLane;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const int col = lane * kOfLane + j;
    if (col >= t.cols) return;
    const float x = v[j] * inverse;
    if (p.format == DType::f8_e4m3) p.data[first + j] = to_f8_e4m3(x).bits;
    if (p.format == DType::f8_e5m2) p.data[first + j] = to_f8_e5m2(x).bits;
    if (p.format != DType::f4_e2m1 || j % 2 != 0) continue;
    const float y = v[j + 1] * inverse;  // columns are even
    const auto code = [&](float z, int at) {
      if (!draws.draw) return to_f4_e2m1(z);
      const DeviceRng rng = draws.rng.at_step(static_cast<uint64_t>(draws.draw[0]));
      return draw_f4_e2m1(z, rng.uniform(draw_index(p, t, draws, i, at)));
    };
    p.data[(first + j) / 2] = static_cast<uint8_t>(code(x, col) | code(y, col + 1) << 4);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_kernel(Problem p, Draws draws) {
  extern __shared__ float tile[];
  const Place t = place_of(p);
  if (t.rows == 0) return;
  load_tile<T>(tile, p, t);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * kRowsOfWarp;
  // Lanes that share a block, and the largest magnitude where rows share one.
  const int lanes = p.layout == ScaleLayout::row_blocks ? 32 : p.layout == ScaleLayout::mx_blocks ? 8 : 4;
  uint32_t of_rows = p.layout == ScaleLayout::square_blocks ? largest_of_tile(tile, p) : 0;
  for (int i = first; p.square && i < first + kRowsOfWarp; ++i) {
    float v[kOfLane];
    row_of(v, tile, p, i, lane);
    of_rows = max(of_rows, largest_of_lanes(largest_of(v), lanes));
  }
  const bool shares_rows = p.square || p.layout == ScaleLayout::square_blocks;
  for (int i = first; i < min(first + kRowsOfWarp, t.rows); ++i) {
    float v[kOfLane];
    row_of(v, tile, p, i, lane);
    const uint32_t m = shares_rows ? of_rows : largest_of_lanes(largest_of(v), lanes);
    const int col = lane * kOfLane;
    const bool leads = p.layout == ScaleLayout::square_blocks ? lane == 0 && i == 0 : lane % lanes == 0;
    const float inverse = store_scale(p, t, i, col, m, leads && col < t.cols);
    store_elements(p, t, draws, v, i, lane, inverse);
  }
}

// to [matrices, C, R] = the transpose of each matrix of from [matrices, R, C].
template <class T>
__global__ void __launch_bounds__(kThreads) transpose_kernel(T* to, const T* from, int64_t R, int64_t C) {
  __shared__ T tile[32][33];
  const int64_t row = int64_t{blockIdx.y} * 32, col = int64_t{blockIdx.x} * 32, matrix = blockIdx.z * R * C;
  for (int i = threadIdx.x / 32; i < 32; i += kWarps) {
    const int64_t r = row + i, c = col + threadIdx.x % 32;
    if (r < R && c < C) tile[i][threadIdx.x % 32] = from[matrix + r * C + c];
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < 32; i += kWarps) {
    const int64_t c = col + i, r = row + threadIdx.x % 32;
    if (r < R && c < C) to[matrix + c * R + r] = tile[threadIdx.x % 32][i];
  }
}

template <class T>
void transpose(Stream& s, T* to, const T* from, const Shape& shape) {
  const int rank = shape.rank();
  const int64_t matrices = rank == 3 ? shape[0] : 1, R = shape[rank - 2], C = shape[rank - 1];
  const dim3 grid(static_cast<unsigned>(div_ceil(C, int64_t{32})), static_cast<unsigned>(div_ceil(R, int64_t{32})),
                  static_cast<unsigned>(matrices));
  transpose_kernel<<<grid, kThreads, 0, cuda_stream(s)>>>(to, from, R, C);
}

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(T* x, Problem p, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) set(x[i], value_of(p, i));
}

// The value at column `column` of the row of q that begins at `row`; with a Hadamard transform, after it is undone.
__device__ float value_before(const Problem& p, int64_t row, int64_t column) {
  if (!p.hadamard) return value_of(p, row + column);
  const int k = static_cast<int>(column % 16);
  float sum = 0;
  for (int j = 0; j < 16; ++j) {
    const float value = value_of(p, row + column - k + j);
    sum = __fadd_rn(sum, __popc(j & k) % 2 != 0 ? -value : value);
  }
  return is_negative(k) ? -0.25f * sum : 0.25f * sum;
}

// x [matrices, R, C] from q.data [matrices, C, columns]. A block moves 32 x 32 elements; lanes are rows of x when they
// read, and columns when they write.
template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_transposed_kernel(T* x, Problem p, int64_t R) {
  __shared__ float tile[32][33];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * 32, row = first + lane, col = int64_t{blockIdx.y} * 32;
  const int64_t end = p.offsets ? min(R, int64_t{p.offsets[p.num_groups]}) : R;
  int64_t column = row;
  if (p.offsets && row < end) {
    int group = 0;
    while (row >= p.offsets[group + 1]) ++group;
    column = group_begin(p.offsets[group], group) + row - p.offsets[group];
  }
  for (int i = threadIdx.x / 32; i < 32; i += kWarps) {
    if (row < end && col + i < p.rows)
      tile[i][lane] = value_before(p, (blockIdx.z * p.rows + col + i) * p.cols, column);
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < 32; i += kWarps) {
    if (first + i < end && col + lane < p.rows)
      set(x[(blockIdx.z * R + first + i) * p.rows + col + lane], tile[lane][i]);
  }
}

// 16 neighbours of a row a thread: they share a scale.
constexpr int kOfVector = 16;

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_vectors_kernel(T* x, Problem p, int64_t num_vectors) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= num_vectors) return;
  const int64_t vectors = p.cols / kOfVector, row = at / vectors;
  const float scale = scale_of(p, row / p.rows, row % p.rows, (at - row * vectors) * kOfVector);
  uint32_t words[4] = {};
  if (p.format == DType::f4_e2m1) {
    const uint2 packed = reinterpret_cast<const uint2*>(p.data)[at];
    words[0] = packed.x, words[1] = packed.y;
  } else {
    const uint4 packed = reinterpret_cast<const uint4*>(p.data)[at];
    words[0] = packed.x, words[1] = packed.y, words[2] = packed.z, words[3] = packed.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float values[kOfVector / 2];
#pragma unroll
    for (int i = 0; i < kOfVector / 2; ++i) {
      const int j = half * kOfVector / 2 + i;
      if (p.format == DType::f8_e4m3)
        values[i] = narrow_float::f8_e4m3_value(words[j / 4] >> (j % 4 * 8) & 255u);
      else if (p.format == DType::f8_e5m2)
        values[i] = narrow_float::f8_e5m2_value(words[j / 4] >> (j % 4 * 8) & 255u);
      else
        values[i] = narrow_float::f4_e2m1_value(words[j / 8] >> (j % 8 * 4) & 15u);
      values[i] *= scale;
    }
    store(x + at * kOfVector + half * (kOfVector / 2), values);
  }
}

int64_t num_matrices(const Quantize& a) { return a.q.data.shape.rank() == 3 ? a.q.data.dim(0) : 1; }

// of_matrix[e] = the bits of the largest magnitude in x of each matrix.
void find_largest(Stream& s, const Quantize& a, void* of_matrix) {
  const int64_t matrices = num_matrices(a);
  check_cuda(cudaMemsetAsync(of_matrix, 0, static_cast<size_t>(matrices) * 4, cuda_stream(s)), "quantize");
  if (a.q.data.empty()) return;
  if (uses_hopper_kernels(s) && a.q.layout == ScaleLayout::per_tensor && sm90::takes_tiles(a)) {
    Quantize into = a;
    into.q.scales.data = of_matrix;
    return sm90::largest_of_tiles(s, into);
  }
  with_float_type(a.x_RC.dtype, [&](auto zero) {
    launch(s, problem_of(a), matrices, largest_kernel<decltype(zero)>, static_cast<uint32_t*>(of_matrix));
  });
}

void take_largest(Stream& s, const Quantize& a, void* of_matrix) {
  const int64_t matrices = num_matrices(a);
  largest_of_ranks_kernel<<<num_blocks(matrices, kThreads), kThreads, 0, cuda_stream(s)>>>(
      static_cast<uint32_t*>(of_matrix), a.magnitude_WB.ptr<int32_t>() + a.first_matrix, matrices,
      a.magnitude_WB.dim(1), narrow<int>(a.magnitude_WB.dim(0)));
}

void quantize_all(Stream& s, const Quantize& a) {
  const bool in_tiles = uses_hopper_kernels(s) && sm90::takes_tiles(a);
  if (in_tiles && a.q.layout != ScaleLayout::per_tensor) return sm90::quantize_tiles(s, a);
  const Problem p = problem_of(a);
  const Tensor& data = a.q.data;
  const int64_t matrices = num_matrices(a);
  const bool is_nv = a.q.layout == ScaleLayout::nv_blocks, of_tensor = is_nv || a.q.layout == ScaleLayout::per_tensor;
  const StochasticRounding& how = a.stochastic;
  const Draws draws{DeviceRng(Rng(how.seed, RngSite::rounding, 0, how.key)),
                    how.draw_2.empty() ? nullptr : how.draw_2.ptr<int64_t>(), how.first_group, how.num_groups};
  auto* of_matrix = static_cast<float*>((is_nv ? a.q.tensor_scale : a.q.scales).data);
  if (of_tensor) a.magnitude_WB.empty() ? find_largest(s, a, of_matrix) : take_largest(s, a, of_matrix);
  if (in_tiles) {
    sm90::quantize_tiles(s, a);
  } else {
    with_float_type(a.x_RC.dtype, [&](auto zero) { launch(s, p, matrices, quantize_kernel<decltype(zero)>, draws); });
  }
  if (of_tensor)
    matrix_scales_kernel<<<num_blocks(matrices, kThreads), kThreads, 0, cuda_stream(s)>>>(of_matrix, matrices, is_nv,
                                                                                          data.dtype);
  check_launch("quantize");
}

}  // namespace

void quantize(Stream& s, const Quantize& a) {
  quantize_all(s, a);
  if (!a.stats_5.empty()) quantize_tile::add_stats(s, a);
}

void largest_magnitudes(Stream& s, const LargestMagnitudes& a) {
  find_largest(s, a.of, a.bits_e.data);
  check_launch("largest_magnitudes");
}

void transpose_quantized(Stream& s, const TransposeQuantized& a) {
  transpose(s, static_cast<uint8_t*>(a.out.data.data), static_cast<const uint8_t*>(a.in.data.data), a.in.data.shape);
  float* to = a.out.scales.ptr<float>();
  const float* from = a.in.scales.ptr<float>();
  if (a.in.layout == ScaleLayout::per_tensor)
    check_cuda(cudaMemcpyAsync(to, from, a.in.scales.num_bytes(), cudaMemcpyDeviceToDevice, cuda_stream(s)),
               "transpose_quantized");
  else
    transpose(s, to, from, a.in.scales.shape);
  check_launch("transpose_quantized");
}

void dequantize(Stream& s, const Dequantize& a) {
  const Problem p = problem_of({.q = a.q, .x_RC = a.q.data});
  const int64_t n = a.x.numel();
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.cols % kOfVector == 0 && reinterpret_cast<uintptr_t>(p.data) % 16 == 0 &&
        reinterpret_cast<uintptr_t>(a.x.data) % 16 == 0) {
      const int64_t vectors = n / kOfVector;
      dequantize_vectors_kernel<T>
          <<<num_blocks(vectors, kThreads), kThreads, 0, cuda_stream(s)>>>(a.x.ptr<T>(), p, vectors);
      return;
    }
    dequantize_kernel<T><<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(a.x.ptr<T>(), p, n);
  });
  check_launch("dequantize");
}

void dequantize_transposed(Stream& s, const DequantizeTransposed& a) {
  Problem p = problem_of({.q = a.q, .x_RC = a.q.data, .offsets_e1 = a.offsets_e1, .hadamard = a.hadamard});
  const int rank = a.x_RC.shape.rank();
  const int64_t R = a.x_RC.dim(rank - 2), matrices = rank == 3 ? a.x_RC.dim(0) : 1;
  const dim3 grid(static_cast<unsigned>(div_ceil(R, int64_t{32})), static_cast<unsigned>(div_ceil(p.rows, int64_t{32})),
                  static_cast<unsigned>(matrices));
  with_float_type(a.x_RC.dtype, [&](auto zero) {
    using T = decltype(zero);
    dequantize_transposed_kernel<T><<<grid, kThreads, 0, cuda_stream(s)>>>(a.x_RC.ptr<T>(), p, R);
  });
  check_launch("dequantize_transposed");
}

}  // namespace moebius::cuda
