// A thread block quantises 128 rows by 128 columns of x, which are one block of every row, or of every
// column, or one block, or a part of a matrix with one scale. It holds them in registers as 16 bytes of a row in a
// lane. A copy in place is written from there. A transposed one goes through shared memory (sm90/tile.h).
#include "ops/quantize/sm90/quantize_tiles.h"

#include "device/cuda/cuda.h"
#include "ops/cuda/grid.h"
#include "ops/quantize/sm90/tile.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kTile = kQuantizeTile, kThreads = 256, kWarps = kThreads / 32, kRowsOfWarp = kTile / kWarps;
constexpr int kLanes = kTileLanes, kReads = kRowsOfWarp / 2;  // reads of two rows of a warp

// The elements that share a scale: 128 of a row of q.data, 128 x 128, or all of a matrix.
enum class ScaledBlock { row, square, matrix };

struct Problem {
  uint8_t* data;
  float* scales;  // of matrices: first the bits of their largest magnitudes, as largest_of_tiles() leaves them
  const uint16_t* x;
  const int32_t *offsets, *token;
  int64_t x_rows, x_cols;  // of each matrix of x
  int64_t width;           // of a row of q.data
  int64_t matrix_size;     // elements of each matrix of q.data
  int64_t scale_cols, matrix_scales;
  int num_groups;
  // Blocks go down the rows of 128 columns before they go to the next 128. So rows that several tiles gather are in L2
  // when they are read again, and a grid has room for any number of rows.
  bool down_first;
};

__device__ __forceinline__ int64_t tile_row(const Problem& p) { return p.down_first ? blockIdx.x : blockIdx.y; }
__device__ __forceinline__ int64_t tile_col(const Problem& p) { return p.down_first ? blockIdx.y : blockIdx.x; }

// The rows [first, first + rows) of x, or of its token index, and the columns [col, col + cols).
struct Place {
  int64_t first, col;
  int rows, cols;
};

__device__ int clamp_to_tile(int64_t n) { return static_cast<int>(max(int64_t{0}, min(int64_t{kTile}, n))); }

// The rows of experts begin at the first offset. Where 128 x 128 share a scale, it is 0: blocks are counted from row 0.
template <bool kTransposed>
__device__ Place place_of(const Problem& p) {
  const int64_t at = tile_row(p) * kTile, col = tile_col(p) * kTile;
  const int cols = clamp_to_tile(p.x_cols - col);
  if (!p.offsets) return {at, col, clamp_to_tile(p.x_rows - at), cols};
  if constexpr (!kTransposed) {
    const int64_t row = p.offsets[0] + at;
    return {row, col, clamp_to_tile(min(p.x_rows, int64_t{p.offsets[p.num_groups]}) - row), cols};
  }
  const int group = group_of_columns(p.offsets, p.num_groups, at);
  const int64_t first = p.offsets[group] + at - group_begin(p.offsets[group], group);
  return {first, col, clamp_to_tile(p.offsets[group + 1] - first), cols};
}

__device__ uint32_t largest_of_block(uint32_t m) {
  __shared__ uint32_t of_warps[kWarps];
  for (int step = 1; step < 32; step *= 2) m = max(m, __shfl_xor_sync(~0u, m, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = m;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) m = max(m, of_warps[w]);
  return m;
}

// The rows of a tile as they are. shared: the largest magnitude of the tile, or of the matrix.
template <ScaledBlock kBlock, DType kElement>
__device__ void store_in_place(const Problem& p, const Place& t, const uint4 (&v)[kReads], uint32_t shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % kLanes;
  uint8_t* data = p.data + blockIdx.z * p.matrix_size;
  float* scales = p.scales + blockIdx.z * p.matrix_scales;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    uint32_t m = shared;
    if constexpr (kBlock == ScaledBlock::row) m = largest_of_row(largest_of(v[i]));
    const TileScale scale = tile_scale<kElement>(m);
    if (r >= t.rows) continue;
    if (kBlock == ScaledBlock::row && chunk == 0) scales[(t.first + r) * p.scale_cols + tile_col(p)] = scale.scale;
    if (kBlock == ScaledBlock::square && threadIdx.x == 0 && i == 0)
      scales[tile_row(p) * p.scale_cols + tile_col(p)] = scale.scale;
    if (chunk * 8 >= t.cols) continue;
    *reinterpret_cast<uint2*>(data + (t.first + r) * p.width + t.col + chunk * 8) =
        pack_chunk<kElement>(v[i], scale.inverse);
  }
}

// The columns of a tile as rows of q.data.
template <ScaledBlock kBlock, DType kElement>
__device__ void store_transposed(const Problem& p, const Place& t, const uint4 (&v)[kReads], uint32_t shared) {
  __shared__ __align__(16) uint32_t tile[kTileWords];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    *reinterpret_cast<uint4*>(tile + r * kTilePitch + lane % kLanes * 4) = v[i];
  }
  __syncthreads();
  constexpr bool kHasScales = kBlock != ScaledBlock::matrix;
  store_columns<kThreads, kBlock != ScaledBlock::row, kElement>(
      tile,
      {.data = p.data + blockIdx.z * p.matrix_size,
       .scales = kHasScales ? p.scales + blockIdx.z * p.matrix_scales : nullptr,
       .width = p.width,
       .scale_cols = p.scale_cols,
       .row = t.col,
       .block = tile_row(p),
       .cols = t.cols},
      shared);
}

// Loads the tile of a block; zeros where it has no elements.
__device__ __forceinline__ void load_tile(const Problem& p, const Place& t, uint4 (&v)[kReads]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % kLanes;
  const uint16_t* x = p.x + blockIdx.z * p.x_rows * p.x_cols + t.col + chunk * 8;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    v[i] = {0, 0, 0, 0};
    if (r >= t.rows || chunk * 8 >= t.cols) continue;
    const int64_t row = p.token ? p.token[t.first + r] : t.first + r;
    v[i] = __ldg(reinterpret_cast<const uint4*>(x + row * p.x_cols));
  }
}

__device__ __forceinline__ uint32_t largest_of_tile(const uint4 (&v)[kReads]) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kReads; ++i) m = max(m, largest_of(v[i]));
  return largest_of_block(m);
}

template <bool kTransposed, ScaledBlock kBlock, DType kElement>
__global__ void __launch_bounds__(kThreads) quantize_tiles_kernel(Problem p) {
  const Place t = place_of<kTransposed>(p);
  if (!kTransposed && t.rows == 0) return;
  uint4 v[kReads];
  load_tile(p, t, v);
  uint32_t shared = 0;
  if constexpr (kBlock == ScaledBlock::square) shared = largest_of_tile(v);
  if constexpr (kBlock == ScaledBlock::matrix) shared = __float_as_uint(p.scales[blockIdx.z]);
  if constexpr (kTransposed)
    store_transposed<kBlock, kElement>(p, t, v, shared);
  else
    store_in_place<kBlock, kElement>(p, t, v, shared);
}

// A maximum does not depend on the order.
template <bool kTransposed>
__global__ void __launch_bounds__(kThreads) largest_of_tiles_kernel(Problem p) {
  const Place t = place_of<kTransposed>(p);
  if (t.rows == 0) return;
  uint4 v[kReads];
  load_tile(p, t, v);
  const uint32_t m = largest_of_tile(v);
  if (threadIdx.x == 0 && m > 0) atomicMax(reinterpret_cast<uint32_t*>(p.scales) + blockIdx.z, m);
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

Problem problem_of(const Quantize& a) {
  const int last = a.x_RC.shape.rank() - 1;
  const Tensor &data = a.q.data, &scales = a.q.scales;
  const bool has_blocks = a.q.layout != ScaleLayout::per_tensor;
  const auto ints = [](const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); };
  return {.data = static_cast<uint8_t*>(data.data),
          .scales = scales.ptr<float>(),
          .x = static_cast<const uint16_t*>(a.x_RC.data),
          .offsets = ints(a.offsets_e1),
          .token = ints(a.token_R),
          .x_rows = a.x_RC.dim(last - 1),
          .x_cols = a.x_RC.dim(last),
          .width = data.dim(last),
          .matrix_size = data.dim(last - 1) * data.dim(last),
          .scale_cols = has_blocks ? scales.dim(last) : 1,
          .matrix_scales = has_blocks ? scales.dim(last - 1) * scales.dim(last) : 1,
          .num_groups = static_cast<int>(a.offsets_e1.numel() - 1),
          .down_first = !a.token_R.empty()};
}

// Returns a block for each tile of `rows` rows of x, and sets p.down_first if they need it.
dim3 grid_of(Problem& p, int64_t rows, int64_t matrices) {
  const int64_t down = div_ceil(rows, int64_t{kTile}), across = div_ceil(p.x_cols, int64_t{kTile});
  p.down_first |= down > kMaxGridY;
  return {static_cast<unsigned>(p.down_first ? down : across), static_cast<unsigned>(p.down_first ? across : down),
          static_cast<unsigned>(matrices)};
}
dim3 grid_of(Problem& p, const Quantize& a) {
  return grid_of(p, a.q.transposed ? p.width : p.x_rows, a.x_RC.shape.rank() == 3 ? a.q.data.dim(0) : 1);
}

}  // namespace

bool takes_tiles(const Quantize& a) {
  const Tensor& data = a.q.data;
  const int last = data.shape.rank() - 1;
  const bool has_blocks = a.q.layout == ScaleLayout::row_blocks || a.q.layout == ScaleLayout::square_blocks;
  const bool is_tensor = a.q.layout == ScaleLayout::per_tensor && data.dtype == DType::f8_e5m2;
  return (is_tensor || ((has_blocks || a.q.layout == ScaleLayout::per_tensor) && data.dtype == DType::f8_e4m3)) &&
         a.x_RC.dtype == DType::bf16 && a.x_RC.dim(last) % 8 == 0 && (!a.q.transposed || data.dim(last) % 16 == 0) &&
         is_aligned(a.x_RC) && is_aligned(data);
}

void largest_of_tiles(Stream& s, const Quantize& a) {
  Problem p = problem_of(a);
  const dim3 grid = grid_of(p, a);
  const auto kernel = a.q.transposed ? largest_of_tiles_kernel<true> : largest_of_tiles_kernel<false>;
  kernel<<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  check_launch("quantize");
}

void quantize_tiles(Stream& s, const Quantize& a) {
  using enum ScaledBlock;
  constexpr DType kE4m3 = DType::f8_e4m3, kE5m2 = DType::f8_e5m2;
  Problem p = problem_of(a);
  const dim3 grid = grid_of(p, a);
  const auto run = [&](auto in_place, auto transposed) {
    const auto kernel = a.q.transposed ? transposed : in_place;
    kernel<<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  };
  if (a.q.layout == ScaleLayout::row_blocks)
    run(quantize_tiles_kernel<false, row, kE4m3>, quantize_tiles_kernel<true, row, kE4m3>);
  else if (a.q.layout == ScaleLayout::square_blocks)
    run(quantize_tiles_kernel<false, square, kE4m3>, quantize_tiles_kernel<true, square, kE4m3>);
  else if (a.q.data.dtype == kE4m3)
    run(quantize_tiles_kernel<false, matrix, kE4m3>, quantize_tiles_kernel<true, matrix, kE4m3>);
  else
    run(quantize_tiles_kernel<false, matrix, kE5m2>, quantize_tiles_kernel<true, matrix, kE5m2>);
  check_launch("quantize");
}

bool takes_tiles(const PackQuantizedRows& a) {
  return a.x_TD.dtype == DType::bf16 && a.x_TD.dim(1) % 8 == 0 && is_aligned(a.x_TD) && is_aligned(a.rows_TB);
}

// A packed row is a row of elements and a row of scales, with the bytes of a packed row from one to the next.
void pack_tiles(Stream& s, const PackQuantizedRows& a) {
  const int64_t D = a.x_TD.dim(1), row_bytes = a.rows_TB.dim(1);
  auto* rows = static_cast<uint8_t*>(a.rows_TB.data);
  Problem p{.data = rows,
            .scales = reinterpret_cast<float*>(rows + D),
            .x = static_cast<const uint16_t*>(a.x_TD.data),
            .offsets = a.offsets_e1.empty() ? nullptr : a.offsets_e1.ptr<int32_t>(),
            .x_rows = a.x_TD.dim(0),
            .x_cols = D,
            .width = row_bytes,
            .scale_cols = row_bytes / int64_t{sizeof(float)},
            .num_groups = static_cast<int>(a.offsets_e1.numel() - 1)};
  const dim3 grid = grid_of(p, p.x_rows, 1);
  quantize_tiles_kernel<false, ScaledBlock::row, DType::f8_e4m3><<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  check_launch("pack_quantized_rows");
}

}  // namespace moebius::cuda::sm90
