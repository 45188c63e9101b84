// A thread block quantises 128 rows by 128 columns of x, which are one block of every row, or of every
// column, or one block. It holds them in registers as 16 bytes of a row in a lane. A copy in place is
// written from there. A transposed one goes through shared memory (sm90/tile.h).
#include "ops/quantize/sm90/quantize_tiles.h"

#include "device/cuda/cuda.h"
#include "ops/quantize/sm90/tile.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kTile = kQuantizeTile, kThreads = 256, kWarps = kThreads / 32, kRowsOfWarp = kTile / kWarps;
constexpr int kLanes = kTileLanes, kReads = kRowsOfWarp / 2;  // reads of two rows of a warp

struct Problem {
  uint8_t* data;
  float* scales;
  const uint16_t* x;
  const int32_t *offsets, *token;
  int64_t x_rows, x_cols;  // of each matrix of x
  int64_t width;           // of a row of q.data
  int64_t matrix_size;     // elements of each matrix of q.data
  int64_t scale_cols, matrix_scales;
  int num_groups;
  // Blocks go down the rows of 128 columns before they go to the next 128, so that rows that several tiles
  // gather are in L2 when they are read again.
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

// The rows of a tile as they are. square: the largest magnitude of the tile.
template <bool kSquare>
__device__ void store_in_place(const Problem& p, const Place& t, const uint4 (&v)[kReads], uint32_t square) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % kLanes;
  uint8_t* data = p.data + blockIdx.z * p.matrix_size;
  float* scales = p.scales + blockIdx.z * p.matrix_scales;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    uint32_t m = square;
    if constexpr (!kSquare) m = largest_of_row(largest_of(v[i]));
    const TileScale scale = tile_scale(m);
    if (r >= t.rows) continue;
    if (!kSquare && chunk == 0) scales[(t.first + r) * p.scale_cols + tile_col(p)] = scale.scale;
    if (kSquare && threadIdx.x == 0 && i == 0) scales[tile_row(p) * p.scale_cols + tile_col(p)] = scale.scale;
    if (chunk * 8 >= t.cols) continue;
    *reinterpret_cast<uint2*>(data + (t.first + r) * p.width + t.col + chunk * 8) = pack_chunk(v[i], scale.inverse);
  }
}

// The columns of a tile as rows of q.data.
template <bool kSquare>
__device__ void store_transposed(const Problem& p, const Place& t, const uint4 (&v)[kReads], uint32_t square) {
  __shared__ __align__(16) uint32_t tile[kTileWords];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    *reinterpret_cast<uint4*>(tile + r * kTilePitch + lane % kLanes * 4) = v[i];
  }
  __syncthreads();
  store_columns<kThreads, kSquare>(tile,
                                   {.data = p.data + blockIdx.z * p.matrix_size,
                                    .scales = p.scales + blockIdx.z * p.matrix_scales,
                                    .width = p.width,
                                    .scale_cols = p.scale_cols,
                                    .row = t.col,
                                    .block = tile_row(p),
                                    .cols = t.cols},
                                   square);
}

template <bool kTransposed, bool kSquare>
__global__ void __launch_bounds__(kThreads) quantize_tiles_kernel(Problem p) {
  const Place t = place_of<kTransposed>(p);
  if (!kTransposed && t.rows == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % kLanes;
  const uint16_t* x = p.x + blockIdx.z * p.x_rows * p.x_cols + t.col + chunk * 8;
  uint4 v[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    v[i] = {0, 0, 0, 0};
    if (r >= t.rows || chunk * 8 >= t.cols) continue;
    const int64_t row = p.token ? p.token[t.first + r] : t.first + r;
    v[i] = __ldg(reinterpret_cast<const uint4*>(x + row * p.x_cols));
  }
  uint32_t square = 0;
  if constexpr (kSquare) {
#pragma unroll
    for (int i = 0; i < kReads; ++i) square = max(square, largest_of(v[i]));
    square = largest_of_block(square);
  }
  if constexpr (kTransposed)
    store_transposed<kSquare>(p, t, v, square);
  else
    store_in_place<kSquare>(p, t, v, square);
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

}  // namespace

bool takes_tiles(const Quantize& a) {
  const Tensor& data = a.q.data;
  const int last = data.shape.rank() - 1;
  const bool is_block = a.q.layout == ScaleLayout::row_blocks || a.q.layout == ScaleLayout::square_blocks;
  return is_block && a.x_RC.dtype == DType::bf16 && data.dtype == DType::f8_e4m3 && a.x_RC.dim(last) % 8 == 0 &&
         (!a.q.transposed || data.dim(last) % 16 == 0) && is_aligned(a.x_RC) && is_aligned(data);
}

void quantize_tiles(Stream& s, const Quantize& a) {
  const int last = a.x_RC.shape.rank() - 1;
  const Tensor &data = a.q.data, &scales = a.q.scales;
  const auto ints = [](const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); };
  const Problem p{.data = static_cast<uint8_t*>(data.data),
                  .scales = scales.ptr<float>(),
                  .x = static_cast<const uint16_t*>(a.x_RC.data),
                  .offsets = ints(a.offsets_e1),
                  .token = ints(a.token_R),
                  .x_rows = a.x_RC.dim(last - 1),
                  .x_cols = a.x_RC.dim(last),
                  .width = data.dim(last),
                  .matrix_size = data.dim(last - 1) * data.dim(last),
                  .scale_cols = scales.dim(last),
                  .matrix_scales = scales.dim(last - 1) * scales.dim(last),
                  .num_groups = static_cast<int>(a.offsets_e1.numel() - 1),
                  .down_first = !a.token_R.empty()};
  const int64_t rows = a.q.transposed ? p.width : p.x_rows;
  const auto down = static_cast<unsigned>(div_ceil(rows, int64_t{kTile})),
             across = static_cast<unsigned>(div_ceil(p.x_cols, int64_t{kTile}));
  const dim3 grid(p.down_first ? down : across, p.down_first ? across : down,
                  static_cast<unsigned>(last == 2 ? data.dim(0) : 1));
  const bool is_square = a.q.layout == ScaleLayout::square_blocks;
  const auto kernel = a.q.transposed
                          ? (is_square ? quantize_tiles_kernel<true, true> : quantize_tiles_kernel<true, false>)
                          : (is_square ? quantize_tiles_kernel<false, true> : quantize_tiles_kernel<false, false>);
  kernel<<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  check_launch("quantize");
}

bool takes_tiles(const PackQuantizedRows& a) {
  return a.x_TD.dtype == DType::bf16 && a.x_TD.dim(1) % 8 == 0 && is_aligned(a.x_TD) && is_aligned(a.rows_TB);
}

// A packed row is a row of elements and a row of scales, with the bytes of a packed row from one to the next.
void pack_tiles(Stream& s, const PackQuantizedRows& a) {
  const int64_t D = a.x_TD.dim(1), row_bytes = a.rows_TB.dim(1);
  auto* rows = static_cast<uint8_t*>(a.rows_TB.data);
  const Problem p{.data = rows,
                  .scales = reinterpret_cast<float*>(rows + D),
                  .x = static_cast<const uint16_t*>(a.x_TD.data),
                  .offsets = a.offsets_e1.empty() ? nullptr : a.offsets_e1.ptr<int32_t>(),
                  .x_rows = a.x_TD.dim(0),
                  .x_cols = D,
                  .width = row_bytes,
                  .scale_cols = row_bytes / int64_t{sizeof(float)},
                  .num_groups = static_cast<int>(a.offsets_e1.numel() - 1)};
  const dim3 grid(static_cast<unsigned>(div_ceil(D, int64_t{kTile})),
                  static_cast<unsigned>(div_ceil(p.x_rows, int64_t{kTile})));
  quantize_tiles_kernel<false, false><<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  check_launch("pack_quantized_rows");
}

}  // namespace moebius::cuda::sm90
