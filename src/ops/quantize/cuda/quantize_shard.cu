// A thread block owns a block of 128 x 128 weights: it reads the elements of it that are here, row by
// row, four columns a thread. Largest magnitudes are integers, so no order of threads changes a bit.
#include "ops/quantize/quantize_shard.h"

#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/quantize/scales.h"

namespace moebius::cuda {
namespace {

constexpr int kBlock = 128, kThreads = 256, kOfLane = 4;
constexpr int kWarps = kThreads / 32, kRowsOfWarp = kBlock / kWarps;
static_assert(kOfLane * 32 == kBlock);

// The elements [first, first + n) of weights that are a number of matrices of rows x cols.
struct Share {
  const float* x;
  int64_t first, n, rows, cols;
};

struct Place {
  int64_t begin;  // the first element of the block in the whole weights
  int rows, cols;
};

// Thread blocks are counted as scales are: down and across the matrices, one after another.
__device__ Place place_of(const Share& share) {
  const int64_t across = (share.cols + kBlock - 1) / kBlock, down = (share.rows + kBlock - 1) / kBlock;
  const int64_t col = blockIdx.x % across * kBlock, down_all = blockIdx.x / across, row = down_all % down * kBlock;
  return {.begin = (down_all / down * share.rows + row) * share.cols + col,
          .rows = static_cast<int>(min(int64_t{kBlock}, share.rows - row)),
          .cols = static_cast<int>(min(int64_t{kBlock}, share.cols - col))};
}

// Calls fn(element of x) for those of this thread that are here.
template <class F>
__device__ __forceinline__ void for_own(const Share& share, const Place& t, F fn) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int r = warp * kRowsOfWarp; r < min((warp + 1) * kRowsOfWarp, t.rows); ++r) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int c = lane + 32 * j;  // neighbours are read together, wherever the share begins
      const int64_t i = t.begin + r * share.cols + c - share.first;
      if (c < t.cols && i >= 0 && i < share.n) fn(i);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) block_magnitudes_kernel(int32_t* bits, Share share) {
  __shared__ uint32_t of_warps[kWarps];
  uint32_t m = 0;
  for_own(share, place_of(share),
          [&](int64_t i) { m = max(m, __float_as_uint(rounded<T>(share.x[i])) & 0x7fffffffu); });
  for (int step = 1; step < 32; step *= 2) m = max(m, __shfl_xor_sync(~0u, m, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) m = max(m, of_warps[w]);
  bits[blockIdx.x] = static_cast<int32_t>(m);
}

// bits: of the first rank, from the first block of these weights on; the next rank's are `stride` after.
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_shard_kernel(uint8_t* q, float* scales, const int32_t* bits, int64_t stride, int num_ranks, Share share) {
  int32_t largest = 0;
  for (int r = 0; r < num_ranks; ++r) largest = max(largest, bits[r * stride + blockIdx.x]);
  const float scale = power_of_two_scale(static_cast<uint32_t>(largest), top_exponent(DType::f8_e4m3));
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  const float inverse = 1.0f / scale;
  for_own(share, place_of(share), [&](int64_t i) { q[i] = to_f8_e4m3(rounded<T>(share.x[i]) * inverse).bits; });
}

Share share_of(const Tensor& x_n, const Shape& whole, int64_t first) {
  const int rank = whole.rank();
  return {.x = static_cast<const float*>(x_n.data),
          .first = first,
          .n = x_n.numel(),
          .rows = whole[rank - 2],
          .cols = whole[rank - 1]};
}

}  // namespace

void block_magnitudes(Stream& s, const BlockMagnitudes& a) {
  if (a.bits_B.empty()) return;
  const Share share = share_of(a.x_n, a.whole, a.first);
  const auto grid = static_cast<unsigned>(a.bits_B.numel());
  with_float_type(a.rounded, [&](auto zero) {
    block_magnitudes_kernel<decltype(zero)>
        <<<grid, kThreads, 0, cuda_stream(s)>>>(static_cast<int32_t*>(a.bits_B.data), share);
  });
  check_launch("block_magnitudes");
}

void quantize_shard(Stream& s, const QuantizeShard& a) {
  if (a.scales.empty()) return;
  const Share share = share_of(a.x_n, a.whole, a.first);
  const auto grid = static_cast<unsigned>(a.scales.numel());
  const auto* bits = static_cast<const int32_t*>(a.bits_WB.data) + a.first_block;
  with_float_type(a.rounded, [&](auto zero) {
    quantize_shard_kernel<decltype(zero)>
        <<<grid, kThreads, 0, cuda_stream(s)>>>(static_cast<uint8_t*>(a.q_n.data), static_cast<float*>(a.scales.data),
                                                bits, a.bits_WB.dim(1), narrow<int>(a.bits_WB.dim(0)), share);
  });
  check_launch("quantize_shard");
}

}  // namespace moebius::cuda
