// A thread block quantises 128 rows by 128 columns of x, which are one block of every row, or of every
// column, or one block. It holds them in registers as 16 bytes of a row in a lane. A copy in place is
// written from there. A transposed one goes through shared memory, from where a thread takes 32 rows of
// two columns.
#include "ops/quantize/sm90/quantize_tiles.h"

#include "device/cuda/cuda.h"
#include "ops/quantize/scales.h"

namespace moebius::cuda::sm90 {
namespace {

constexpr int kTile = 128, kThreads = 256, kWarps = kThreads / 32, kRowsOfWarp = kTile / kWarps;
constexpr int kLanes = 16, kReads = kRowsOfWarp / 2;  // lanes that share a row; reads of two rows of a warp
constexpr int kPitch = kTile / 2 + 4;                 // words of a row in shared memory: chunks stay aligned
constexpr int kSegments = 4, kSegmentRows = kTile / kSegments, kChunks = kTile / 16;
static_assert(kGroupAlign == kTile && kLanes * 8 == kTile && kThreads == kSegments * kTile / 2);

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
};

// The rows [first, first + rows) of x, or of its token index, and the columns [col, col + cols).
struct Place {
  int64_t first, col;
  int rows, cols;
};

__device__ int clamp_to_tile(int64_t n) { return static_cast<int>(max(int64_t{0}, min(int64_t{kTile}, n))); }

template <bool kTransposed>
__device__ Place place_of(const Problem& p) {
  const int64_t at = int64_t{blockIdx.y} * kTile, col = int64_t{blockIdx.x} * kTile;
  const int cols = clamp_to_tile(p.x_cols - col);
  if (!p.offsets) return {at, col, clamp_to_tile(p.x_rows - at), cols};
  if constexpr (!kTransposed)
    return {at, col, clamp_to_tile(min(p.x_rows, int64_t{p.offsets[p.num_groups]}) - at), cols};
  int group = 0;  // the last one that begins at `at` or before
  for (int size = p.num_groups; size > 1;) {
    const int half = size / 2;
    if (group_begin(p.offsets[group + half], group + half) <= at) group += half;
    size -= half;
  }
  const int64_t first = p.offsets[group] + at - group_begin(p.offsets[group], group);
  return {first, col, clamp_to_tile(p.offsets[group + 1] - first), cols};
}

__device__ __forceinline__ float low(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ uint32_t low_magnitude(uint32_t word) { return (word << 16) & 0x7fff0000u; }
__device__ __forceinline__ uint32_t high_magnitude(uint32_t word) { return word & 0x7fff0000u; }

__device__ __forceinline__ uint32_t largest_of(const uint4& v) {
  uint32_t m = 0;
  for (const uint32_t word : {v.x, v.y, v.z, v.w}) m = max(m, max(low_magnitude(word), high_magnitude(word)));
  return m;
}

// Rounded to nearest even, saturated; a NaN becomes 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint16_t lo, hi;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x3), "f"(x2));
  return lo | static_cast<uint32_t>(hi) << 16;
}
__device__ __forceinline__ uint32_t pack_words(uint32_t a, uint32_t b, float inverse) {
  return pack_e4m3(low(a) * inverse, high(a) * inverse, low(b) * inverse, high(b) * inverse);
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

__device__ float scale_of(uint32_t m) { return power_of_two_scale(m, top_exponent(DType::f8_e4m3)); }

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
    if constexpr (!kSquare) {
      m = largest_of(v[i]);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) m = max(m, __shfl_xor_sync(~0u, m, step));
    }
    const float scale = scale_of(m), inverse = 1.0f / scale;
    if (r >= t.rows) continue;
    if (!kSquare && chunk == 0) scales[(t.first + r) * p.scale_cols + blockIdx.x] = scale;
    if (kSquare && threadIdx.x == 0 && i == 0) scales[int64_t{blockIdx.y} * p.scale_cols + blockIdx.x] = scale;
    if (chunk * 8 >= t.cols) continue;
    const uint2 out{pack_words(v[i].x, v[i].y, inverse), pack_words(v[i].z, v[i].w, inverse)};
    *reinterpret_cast<uint2*>(data + (t.first + r) * p.width + t.col + chunk * 8) = out;
  }
}

// The columns of a tile as rows of q.data.
template <bool kSquare>
__device__ void store_transposed(const Problem& p, const Place& t, const uint4 (&v)[kReads], uint32_t square) {
  __shared__ __align__(16) uint32_t tile[kTile * kPitch];
  __shared__ uint2 of_segments[kSegments][kTile / 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int r = warp * kRowsOfWarp + 2 * i + lane / kLanes;
    *reinterpret_cast<uint4*>(tile + r * kPitch + lane % kLanes * 4) = v[i];
  }
  __syncthreads();
  const int pair = threadIdx.x % (kTile / 2), segment = threadIdx.x / (kTile / 2);
  uint32_t words[kSegmentRows];
  uint2 m{square, square};
#pragma unroll
  for (int r = 0; r < kSegmentRows; ++r) {
    words[r] = tile[(segment * kSegmentRows + r) * kPitch + pair];
    if constexpr (!kSquare) m = {max(m.x, low_magnitude(words[r])), max(m.y, high_magnitude(words[r]))};
  }
  if constexpr (!kSquare) {
    of_segments[segment][pair] = m;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSegments; ++s) m = {max(m.x, of_segments[s][pair].x), max(m.y, of_segments[s][pair].y)};
  }
  const float scale[2] = {scale_of(m.x), scale_of(m.y)};
  if (segment == 0 && 2 * pair < t.cols) {
    float* scales = p.scales + blockIdx.z * p.matrix_scales;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!kSquare) scales[(t.col + 2 * pair + j) * p.scale_cols + blockIdx.y] = scale[j];
      if (kSquare && pair == 0) scales[int64_t{blockIdx.x} * p.scale_cols + blockIdx.y] = scale[j];
    }
  }
  // Through shared memory again, so that a row of q.data leaves in whole lines. A chunk is 16 bytes, and the
  // chunks of a row change places so that neighbouring pairs are in different banks.
  __syncthreads();
  uint4* const rows = reinterpret_cast<uint4*>(tile);
  const auto place = [](int row, int chunk) { return row * kChunks + (chunk ^ row / 2 % kChunks); };
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float inverse = 1.0f / scale[j];
    const auto element = [&](int r) { return (j == 0 ? low(words[r]) : high(words[r])) * inverse; };
#pragma unroll
    for (int i = 0; i < kSegmentRows; i += 16) {
      uint32_t out[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        out[q] = pack_e4m3(element(i + 4 * q), element(i + 4 * q + 1), element(i + 4 * q + 2), element(i + 4 * q + 3));
      rows[place(2 * pair + j, (segment * kSegmentRows + i) / 16)] = {out[0], out[1], out[2], out[3]};
    }
  }
  __syncthreads();
  const int64_t at = int64_t{blockIdx.y} * kTile;
  uint8_t* data = p.data + blockIdx.z * p.matrix_size + at;
#pragma unroll
  for (int k = threadIdx.x; k < kTile * kChunks; k += kThreads) {
    const int row = k / kChunks, chunk = k % kChunks;
    if (row >= t.cols || at + 16 * chunk >= p.width) continue;
    *reinterpret_cast<uint4*>(data + (t.col + row) * p.width + 16 * chunk) = rows[place(row, chunk)];
  }
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
                  .num_groups = static_cast<int>(a.offsets_e1.numel() - 1)};
  const int64_t rows = a.q.transposed ? p.width : p.x_rows;
  const dim3 grid(static_cast<unsigned>(div_ceil(p.x_cols, int64_t{kTile})),
                  static_cast<unsigned>(div_ceil(rows, int64_t{kTile})),
                  static_cast<unsigned>(last == 2 ? data.dim(0) : 1));
  const bool is_square = a.q.layout == ScaleLayout::square_blocks;
  const auto kernel = a.q.transposed
                          ? (is_square ? quantize_tiles_kernel<true, true> : quantize_tiles_kernel<true, false>)
                          : (is_square ? quantize_tiles_kernel<false, true> : quantize_tiles_kernel<false, false>);
  kernel<<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  check_launch("quantize");
}

}  // namespace moebius::cuda::sm90
