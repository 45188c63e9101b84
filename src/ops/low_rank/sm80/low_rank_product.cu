// low_rank_product for compute capability 8.0 and later. Both kernels are bound by memory: one reads
// many columns and writes few (A x and B^T dy), the other reads few and adds to many (B u and A^T v).
// A block owns 128 rows of one matrix, a warp 16 of them. A sum runs over k in order, 16 at a time.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/low_rank/cuda/low_rank.h"
#include "ops/low_rank/sm80/tiles.h"

namespace moebius::cuda::sm80 {
namespace {

constexpr int kRows = 128;

struct Product {
  LowRankWindow y, x, w;  // w: of the first matrix
  int64_t w_matrix;       // elements from a matrix to the next
  LowRankRows rows;
  const int32_t* token;
  int32_t col_tiles;  // tiles across the columns; those of one tile of rows are neighbouring blocks
  bool accumulate;
  float scale;

  __device__ __forceinline__ LowRankWindow weights(int32_t matrix) const {
    return {w.data + matrix * w_matrix, w.ld, w.count, w.unit};
  }
};

// Writes the first n of two neighbouring sums, which are no whole word.
__device__ __forceinline__ void add_each(const Product& p, uint16_t* to, int32_t n, float first, float second) {
  bf16* y = reinterpret_cast<bf16*>(to);
  set(y[0], (p.accumulate ? element(y[0]) : 0.0f) + p.scale * first);
  if (n > 1) set(y[1], (p.accumulate ? element(y[1]) : 0.0f) + p.scale * second);
}

// Computes kCols columns over all of k in slots of 64. A ring of copies keeps the memory busy.
template <int kCols>
struct Narrow {
  static constexpr int kDepth = 64, kSlots = 4;
  static constexpr int kBytesX = kRows * kDepth * 2, kBytesW = kCols * kDepth * 2;
  static constexpr int kBytes = kSlots * (kBytesX + kBytesW);
  static constexpr int kChunks = kDepth / 8, kCopies = kRows * kChunks / kLowRankThreads;
};

template <int kCols, bool kTransposed>
__global__ void __launch_bounds__(kLowRankThreads, 2) narrow_kernel(const __grid_constant__ Product p) {
  using Shape = Narrow<kCols>;
  constexpr int kDepth = Shape::kDepth, kChunks = Shape::kChunks, kSlots = Shape::kSlots;
  extern __shared__ __align__(128) unsigned char shared[];
  const RowRange tile = find_tile<kRows>(p.rows, static_cast<int32_t>(blockIdx.x) / p.col_tiles);
  if (tile.matrix < 0) return;
  const uint32_t slots = shared_address(shared), chunk = threadIdx.x % kChunks;
  const int32_t n = static_cast<int32_t>(blockIdx.x) % p.col_tiles * kCols, K = p.x.count;
  const LowRankWindow w = p.weights(tile.matrix);

  // Each thread copies one chunk of the same rows in every slot.
  const uint16_t* from[Shape::kCopies];
  uint32_t there = 0;
#pragma unroll
  for (int i = 0; i < Shape::kCopies; ++i) {
    const int32_t r = tile.begin + static_cast<int32_t>(threadIdx.x / kChunks) + i * (kLowRankThreads / kChunks);
    const bool valid = r < tile.end;
    const int64_t row = valid ? (p.token != nullptr ? __ldg(p.token + r) : r) : 0;
    there |= (valid ? 1u : 0u) << i;
    from[i] = p.x.data + row * p.x.ld + 8 * chunk;
  }
  const auto copy = [&](int32_t k, uint32_t slot) {
    const uint32_t to = slots + slot * (Shape::kBytesX + Shape::kBytesW);
    if (k < K) {
      const int32_t left = K - k - static_cast<int32_t>(8 * chunk);
#pragma unroll
      for (int i = 0; i < Shape::kCopies; ++i) {
        const uint32_t row = threadIdx.x / kChunks + i * (kLowRankThreads / kChunks);
        p.x.copy(to + swizzled<kChunks>(row, chunk), left > 0 ? from[i] + k : p.x.data, left, (there >> i & 1) != 0);
      }
      if constexpr (kTransposed)
        copy_tile<kDepth, kCols / 8>(to + Shape::kBytesX, w, k, K, n, p.y.count);
      else
        copy_tile<kCols, kChunks>(to + Shape::kBytesX, w, n, p.y.count, k, K);
    }
    commit_copies();
  };

  const uint32_t row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  float sums[kCols / 8][4] = {};
  for (int i = 0; i < kSlots - 1; ++i) copy(i * kDepth, i);
  uint32_t slot = 0;
  for (int32_t k = 0; k < K; k += kDepth) {
    wait_copies<kSlots - 2>();
    __syncthreads();
    copy(k + (kSlots - 1) * kDepth, (slot + kSlots - 1) % kSlots);
    const uint32_t at = slots + slot * (Shape::kBytesX + Shape::kBytesW);
#pragma unroll
    for (uint32_t step = 0; step < kDepth / 16; ++step) {
      uint32_t a[4];
      load_a_along_k<kChunks>(a, at, row, step);
#pragma unroll
      for (uint32_t j = 0; j < kCols / 16; ++j) {
        uint32_t b[4];
        if constexpr (kTransposed)
          load_b_across_k<kCols / 8>(b, at + Shape::kBytesX, 16 * j, step);
        else
          load_b_along_k<kChunks>(b, at + Shape::kBytesX, 16 * j, step);
        multiply(sums[2 * j], a, b[0], b[1]);
        multiply(sums[2 * j + 1], a, b[2], b[3]);
      }
    }
    slot = (slot + 1) % kSlots;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t r = tile.begin + static_cast<int32_t>(row + lane / 4 + 8 * i);
    if (r >= tile.end) continue;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const int32_t c = n + 8 * j + static_cast<int32_t>(lane % 4 * 2);
      if (c >= p.y.count) continue;
      if (p.y.unit == 2) {
        add_each(p, p.y.data + r * p.y.ld + c, p.y.count - c, sums[j][2 * i], sums[j][2 * i + 1]);
        continue;
      }
      auto* to = reinterpret_cast<__nv_bfloat162*>(p.y.data + r * p.y.ld + c);
      const float2 old = p.accumulate ? __bfloat1622float2(*to) : float2{0, 0};
      *to = __floats2bfloat162_rn(old.x + p.scale * sums[j][2 * i], old.y + p.scale * sums[j][2 * i + 1]);
    }
  }
}

// Computes 128 columns of the result over k in pieces of kDepth. y is kept in shared memory, so that it is read and
// written in whole rows.
struct Wide {
  static constexpr int kCols = 128, kDepth = 32;
  static constexpr int kBytesY = kRows * kCols * 2, kBytesX = kRows * kDepth * 2, kBytesW = kCols * kDepth * 2;
  static constexpr int kBytes = kBytesY + kBytesX + kBytesW;
};

template <bool kTransposed>
__global__ void __launch_bounds__(kLowRankThreads, 2) wide_kernel(const __grid_constant__ Product p) {
  constexpr int kCols = Wide::kCols, kDepth = Wide::kDepth, kChunksY = kCols / 8, kChunks = kDepth / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const RowRange tile = find_tile<kRows>(p.rows, static_cast<int32_t>(blockIdx.x) / p.col_tiles);
  if (tile.matrix < 0) return;
  const uint32_t y = shared_address(shared), x = y + Wide::kBytesY, w = x + Wide::kBytesX;
  const int32_t n = static_cast<int32_t>(blockIdx.x) % p.col_tiles * kCols, K = p.x.count;
  const uint32_t row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  const LowRankWindow weights = p.weights(tile.matrix);

  if (p.accumulate) copy_tile<kRows, kChunksY>(y, p.y, tile.begin, tile.end, n, p.y.count);
  float sums[kCols / 8][4] = {};
  for (int32_t k = 0; k < K; k += kDepth) {
    if (k > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kLowRankThreads; ++i) {
      const uint32_t at = threadIdx.x + i * kLowRankThreads, to = at / kChunks, chunk = at % kChunks;
      const int32_t r = tile.begin + static_cast<int32_t>(to), c = k + static_cast<int32_t>(8 * chunk);
      const bool valid = r < tile.end && c < K;
      const int64_t source = valid ? (p.token != nullptr ? __ldg(p.token + r) : r) : 0;
      p.x.copy(x + swizzled<kChunks>(to, chunk), p.x.chunk(source, valid ? c : 0), K - c, valid);
    }
    if constexpr (kTransposed)
      copy_tile<kDepth, kChunksY>(w, weights, k, K, n, p.y.count);
    else
      copy_tile<kCols, kChunks>(w, weights, n, p.y.count, k, K);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (uint32_t step = 0; step < kDepth / 16; ++step) {
      if (k + static_cast<int32_t>(16 * step) >= K) break;
      uint32_t a[4];
      load_a_along_k<kChunks>(a, x, row, step);
#pragma unroll
      for (uint32_t j = 0; j < kCols / 16; ++j) {
        uint32_t b[4];
        if constexpr (kTransposed)
          load_b_across_k<kChunksY>(b, w, 16 * j, step);
        else
          load_b_along_k<kChunks>(b, w, 16 * j, step);
        multiply(sums[2 * j], a, b[0], b[1]);
        multiply(sums[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
  // A warp adds to its own rows in shared memory, and writes them.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < kCols / 8; ++j) {
      auto* to =
          reinterpret_cast<__nv_bfloat162*>(shared + swizzled<kChunksY>(row + lane / 4 + 8 * i, j) + lane % 4 * 4);
      const float2 old = p.accumulate ? __bfloat1622float2(*to) : float2{0, 0};
      *to = __floats2bfloat162_rn(old.x + p.scale * sums[j][2 * i], old.y + p.scale * sums[j][2 * i + 1]);
    }
  }
  __syncwarp();
  const uint32_t chunk = lane % kChunksY;
  const int32_t c = n + static_cast<int32_t>(8 * chunk);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t at = row + 2 * i + lane / kChunksY;
    const int32_t r = tile.begin + static_cast<int32_t>(at);
    if (r >= tile.end || c >= p.y.count) continue;
    if (p.y.unit != 16) {
      const auto* from = reinterpret_cast<const uint16_t*>(shared + swizzled<kChunksY>(at, chunk));
      for (int32_t j = 0; j < min(p.y.count - c, 8); ++j) p.y.data[r * p.y.ld + c + j] = from[j];
      continue;
    }
    *reinterpret_cast<uint4*>(p.y.data + r * p.y.ld + c) =
        *reinterpret_cast<const uint4*>(shared + swizzled<kChunksY>(at, chunk));
  }
}

using Kernel = void (*)(Product);

void launch(Stream& s, Kernel kernel, Product p, int bytes, int cols) {
  p.col_tiles = (p.y.count + cols - 1) / cols;
  static_assert(std::max(Narrow<64>::kBytes, Wide::kBytes) <= kMinSharedBytes);
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const auto blocks = static_cast<unsigned>((p.rows.num_rows / kRows + p.rows.num_matrices) * p.col_tiles);
  kernel<<<blocks, kLowRankThreads, bytes, cuda_stream(s)>>>(p);
  check_launch("low_rank_product");
}

template <int kCols>
void launch_narrow(Stream& s, const Product& p, bool transposed) {
  launch(s, transposed ? narrow_kernel<kCols, true> : narrow_kernel<kCols, false>, p, Narrow<kCols>::kBytes, kCols);
}

}  // namespace

bool takes(const LowRankProduct& a) {
  const Matrices w(a.w_ePQ);
  return takes_window(a.y_RM, a.y) && takes_window(a.x_TK, a.x) &&
         (a.y_RM.dim(0) / kRows + w.num) * (a.y.count / 32 + 1) < INT32_MAX;
}

void low_rank_product(Stream& s, const LowRankProduct& a) {
  const Matrices w(a.w_ePQ);
  uint16_t* first_w = static_cast<uint16_t*>(a.w_ePQ.data) + a.w_first * w.cols;
  const Product p{
      .y = window_of(a.y_RM, a.y),
      .x = window_of(a.x_TK, a.x),
      .w = {first_w, w.cols, static_cast<int32_t>(w.cols), copy_unit(first_w, w.cols)},
      .w_matrix = w.rows * w.cols,
      .rows = {index_of(a.rows.offsets_e1), static_cast<int32_t>(w.num), static_cast<int32_t>(a.y_RM.dim(0))},
      .token = index_of(a.rows.token_R),
      .accumulate = a.accumulate,
      .scale = a.scale};
  if (a.y.count > 64 || a.y.count > a.x.count)
    launch(s, a.transposed ? wide_kernel<true> : wide_kernel<false>, p, Wide::kBytes, Wide::kCols);
  else if (a.y.count > 32)
    launch_narrow<64>(s, p, a.transposed);
  else
    launch_narrow<32>(s, p, a.transposed);
}

}  // namespace moebius::cuda::sm80
