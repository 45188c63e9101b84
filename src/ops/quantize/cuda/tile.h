// Tiles of a quantised matrix on a GPU: a thread block has 128 x 128 elements of q.data, which holds every block of
// every layout whole. It reads x row by row, also where q is transposed; the tile in shared memory turns it.
#pragma once

#include "device/cuda/cuda.h"
#include "ops/cuda/grid.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/scales.h"

namespace moebius::cuda::quantize_tile {

constexpr int kTile = 128, kThreads = 256, kWarps = kThreads / 32, kRowsOfWarp = kTile / kWarps;
constexpr int kPitch = kTile + 1;  // of a tile's row in shared memory: columns are in banks of their own
constexpr int kSharedBytes = kTile * kPitch * 4;
constexpr int kOfLane = 4;  // elements of a row that a lane holds
static_assert(kRowsOfWarp == 16 && kOfLane * 32 == kTile && kGroupAlign % kTile == 0);

struct Problem {
  uint8_t* data;
  void* scales;
  float* tensor_scale;  // first the bits of the largest magnitude of each matrix
  const void* x;
  const int32_t *offsets, *token;
  int64_t x_rows, x_cols, rows, cols;  // of each matrix of x, and of q.data
  int num_groups;
  ScaleLayout layout;
  DType format;
  bool transposed, square, hadamard;
  bool down_first;  // the grid's first dimension goes down the tiles; else across them
};

struct Place {
  int64_t matrix, row, col;  // of the tile in q.data
  int rows, cols;
  int64_t group, begin;  // of a transposed tile: its expert, and the row of x in its first column
  int filled;            // how many of its columns have a row
};

inline __device__ Place place_of(const Problem& p) {
  const uint32_t down = p.down_first ? blockIdx.x : blockIdx.y, across = p.down_first ? blockIdx.y : blockIdx.x;
  Place t{.matrix = blockIdx.z, .row = int64_t{down} * kTile, .col = int64_t{across} * kTile};
  int64_t rows = p.rows, end = p.x_rows;
  if (p.offsets && !p.transposed) rows = min(rows, int64_t{p.offsets[p.num_groups]});
  t.rows = static_cast<int>(max(int64_t{0}, min(int64_t{kTile}, rows - t.row)));
  t.cols = static_cast<int>(min(int64_t{kTile}, p.cols - t.col));
  t.group = 0;
  t.begin = t.col;
  if (p.offsets && p.transposed) {
    t.group = p.num_groups - 1;
    while (t.group > 0 && group_begin(p.offsets[t.group], t.group) > t.col) --t.group;
    t.begin = p.offsets[t.group] + t.col - group_begin(p.offsets[t.group], t.group);
    end = p.offsets[t.group + 1];
  }
  t.filled = static_cast<int>(max(int64_t{0}, min(int64_t{t.cols}, end - t.begin)));
  return t;
}

// tile[i * kPitch + j] = x of row i and column j of the tile.
template <class T>
inline __device__ void load_tile(float* tile, const Problem& p, const Place& t) {
  const T* x = static_cast<const T*>(p.x) + t.matrix * p.x_rows * p.x_cols;
  for (int k = threadIdx.x; k < kTile * kTile; k += kThreads) {
    const int outer = k / kTile, inner = k % kTile;  // inner runs along a row of x
    if (!p.transposed) {
      const bool is_inside = outer < t.rows && inner < t.cols;
      tile[outer * kPitch + inner] = is_inside ? element(x[(t.row + outer) * p.x_cols + t.col + inner]) : 0.0f;
      continue;
    }
    const bool is_inside = outer < t.filled && inner < t.rows;
    const int64_t r = t.begin + outer;
    const int64_t row = is_inside && p.token ? p.token[r] : r;
    tile[inner * kPitch + outer] = is_inside ? element(x[row * p.x_cols + t.row + inner]) : 0.0f;
  }
  __syncthreads();
}

// The sign of x[i], i < 16, before the Hadamard transform.
inline __device__ bool is_negative(int i) { return (0b1101011111101000u >> i & 1u) != 0; }

// x diag(signs) H / 4 of 16 numbers in four lanes: the rounds of the CPU, two within a lane and two
// between lanes.
inline __device__ void hadamard(float (&v)[kOfLane], int lane) {
  const int first = lane % 4 * kOfLane;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) v[j] = is_negative(first + j) ? -v[j] : v[j];
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const float other = __shfl_xor_sync(~0u, v[j], step);
      v[j] = lane & step ? other - v[j] : v[j] + other;
    }
  }
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) v[j] *= 0.25f;
}

// The elements of a lane in row i of the tile.
inline __device__ void row_of(float (&v)[kOfLane], const float* tile, const Problem& p, int i, int lane) {
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) v[j] = tile[i * kPitch + lane * kOfLane + j];
  if (p.hadamard) hadamard(v, lane);
}

inline __device__ float scale_of(const Problem& p, int64_t matrix, int64_t row, int64_t col) {
  const auto at = [&](int64_t down, int64_t across) {
    const int64_t rows = (p.rows + down - 1) / down, cols = (p.cols + across - 1) / across;
    return (matrix * rows + row / down) * cols + col / across;
  };
  const auto* bytes = static_cast<const uint8_t*>(p.scales);
  const auto* floats = static_cast<const float*>(p.scales);
  switch (p.layout) {
    case ScaleLayout::per_tensor:
      return floats[matrix];
    case ScaleLayout::row_blocks:
      return floats[at(1, kTile)];
    case ScaleLayout::square_blocks:
      return floats[at(kTile, kTile)];
    case ScaleLayout::mx_blocks:
      return narrow_float::e8m0_value(bytes[at(1, 32)]);
    default:
      return narrow_float::f8_e4m3_value(bytes[at(1, 16)]) * p.tensor_scale[matrix];
  }
}

// The value of element i of all matrices.
inline __device__ float value_of(const Problem& p, int64_t i) {
  const float scale = scale_of(p, i / p.cols / p.rows, i / p.cols % p.rows, i % p.cols);
  float value = 0;
  if (p.format == DType::f8_e4m3) value = narrow_float::f8_e4m3_value(p.data[i]);
  if (p.format == DType::f8_e5m2) value = narrow_float::f8_e5m2_value(p.data[i]);
  if (p.format == DType::f4_e2m1) value = narrow_float::f4_e2m1_value(p.data[i / 2] >> (i % 2 * 4) & 15u);
  return value * scale;
}

inline Problem problem_of(const Quantize& a) {
  const int rank = a.x_RC.shape.rank();
  const Tensor& data = a.q.data;
  const auto ints = [](const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); };
  return {.data = static_cast<uint8_t*>(data.data),
          .scales = a.q.scales.data,
          .tensor_scale = static_cast<float*>(a.q.tensor_scale.data),
          .x = a.x_RC.data,
          .offsets = ints(a.offsets_e1),
          .token = ints(a.token_R),
          .x_rows = a.x_RC.dim(rank - 2),
          .x_cols = a.x_RC.dim(rank - 1),
          .rows = data.dim(rank - 2),
          .cols = data.dim(rank - 1),
          .num_groups = static_cast<int>(a.offsets_e1.numel() - 1),
          .layout = a.q.layout,
          .format = data.dtype,
          .transposed = a.q.transposed,
          .square = a.square,
          .hadamard = a.hadamard,
          .down_first = div_ceil(data.dim(rank - 2), int64_t{kTile}) > kMaxGridY};
}

// Runs a kernel with a thread block for each tile.
template <class Kernel, class... Args>
void launch(Stream& s, const Problem& p, int64_t matrices, Kernel kernel, Args... args) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "quantize");
  const auto across = static_cast<unsigned>(div_ceil(p.cols, int64_t{kTile})),
             down = static_cast<unsigned>(div_ceil(p.rows, int64_t{kTile}));
  const dim3 grid(p.down_first ? down : across, p.down_first ? across : down, static_cast<unsigned>(matrices));
  kernel<<<grid, kThreads, kSharedBytes, cuda_stream(s)>>>(p, args...);
}

}  // namespace moebius::cuda::quantize_tile
