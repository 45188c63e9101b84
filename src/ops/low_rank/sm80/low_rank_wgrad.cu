// low_rank_wgrad for compute capability 8.0 and later. One side has many columns and the other few: a block owns 128
// columns of the wide side and 32 or 64 of the narrow one, of one matrix, and reads all of its rows. If the rows are
// split (low_rank_wgrad_tiles.h), a second kernel adds the parts in order.
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/low_rank/cuda/low_rank.h"
#include "ops/low_rank/low_rank_wgrad_tiles.h"
#include "ops/low_rank/sm80/tiles.h"

namespace moebius::cuda::sm80 {
namespace {

constexpr int kWide = kLowRankWideTile, kDepth = 64, kSlots = 3;

struct Side {
  LowRankWindow x;
  const int32_t* token;  // null: read in place
};

struct Wgrad {
  float* dw;                                      // of the first matrix, from its first row on
  int64_t dw_matrix, wide_stride, narrow_stride;  // elements from one matrix, wide column, narrow column to the next
  Side wide, narrow;
  LowRankRows rows;
  int32_t wide_tiles, narrow_tiles, num_parts;
  float* parts;  // [num_parts, matrices, wide columns, narrow columns] with several parts
  float scale;
};

// Copies one side, row after row. A thread looks up its rows of a slot while the slot before it is copied.
template <int kChunks>
struct SideCopies {
  static constexpr int kCopies = kDepth * kChunks / kLowRankThreads, kRowsAtOnce = kLowRankThreads / kChunks;
  const Side& side;
  int32_t column, row, end;
  int32_t next[kCopies] = {};  // negative: no row

  __device__ __forceinline__ SideCopies(const Side& side, int32_t first_column, int32_t begin, int32_t end)
      : side(side),
        column(first_column + static_cast<int32_t>(8 * (threadIdx.x % kChunks))),
        row(begin + static_cast<int32_t>(threadIdx.x / kChunks)),
        end(end) {
    look_up();
  }
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t r = row + i * kRowsAtOnce;
      next[i] = r < end && column < side.x.count ? (side.token != nullptr ? __ldg(side.token + r) : r) : -1;
    }
    row += kDepth;
  }
  __device__ __forceinline__ void copy(uint32_t to) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t at = threadIdx.x / kChunks + i * kRowsAtOnce;
      const bool valid = next[i] >= 0;
      side.x.copy(to + swizzled<kChunks>(at, threadIdx.x % kChunks),
                  side.x.chunk(valid ? next[i] : 0, valid ? column : 0), side.x.count - column, valid);
    }
    look_up();
  }
};

template <int kNarrow>
struct WgradShared {
  static constexpr int kBytesWide = kDepth * kWide * 2, kBytesNarrow = kDepth * kNarrow * 2;
  static constexpr int kBytes = kSlots * (kBytesWide + kBytesNarrow);
};

template <int kNarrow>
__global__ void __launch_bounds__(kLowRankThreads, 2) wgrad_kernel(const __grid_constant__ Wgrad p) {
  using Shared = WgradShared<kNarrow>;
  extern __shared__ __align__(128) unsigned char shared[];
  int32_t index = static_cast<int32_t>(blockIdx.x);
  const int32_t wide = index % p.wide_tiles * kWide;
  index /= p.wide_tiles;
  const int32_t narrow = index % p.narrow_tiles * kNarrow;
  index /= p.narrow_tiles;
  const int32_t part = index % p.num_parts, matrix = index / p.num_parts;
  const int32_t first = p.rows.offsets != nullptr ? __ldg(p.rows.offsets + matrix) : 0;
  const int32_t last = p.rows.offsets != nullptr ? __ldg(p.rows.offsets + matrix + 1) : p.rows.num_rows;
  const int32_t length = ((last - first + p.num_parts - 1) / p.num_parts + kDepth - 1) / kDepth * kDepth;
  const int32_t begin = min(first + part * length, last), end = min(begin + length, last);
  if (first == last && p.num_parts == 1) return;

  const uint32_t slots = shared_address(shared);
  SideCopies<kWide / 8> copies(p.wide, wide, begin, end);
  SideCopies<kNarrow / 8> narrow_copies(p.narrow, narrow, begin, end);
  const int32_t steps = (end - begin + kDepth - 1) / kDepth;
  const auto copy = [&](int32_t i) {
    if (i < steps) {
      const uint32_t to = slots + static_cast<uint32_t>(i % kSlots) * (Shared::kBytesWide + Shared::kBytesNarrow);
      copies.copy(to);
      narrow_copies.copy(to + Shared::kBytesWide);
    }
    commit_copies();
  };
  const uint32_t column = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  float sums[kNarrow / 8][4] = {};
  for (int i = 0; i < kSlots - 1; ++i) copy(i);
  for (int32_t i = 0; i < steps; ++i) {
    wait_copies<kSlots - 2>();
    __syncthreads();
    copy(i + kSlots - 1);
    const uint32_t at = slots + static_cast<uint32_t>(i % kSlots) * (Shared::kBytesWide + Shared::kBytesNarrow);
#pragma unroll
    for (uint32_t step = 0; step < kDepth / 16; ++step) {
      uint32_t a[4];
      load_a_across_k<kWide / 8>(a, at, column, step);
#pragma unroll
      for (uint32_t j = 0; j < kNarrow / 16; ++j) {
        uint32_t b[4];
        load_b_across_k<kNarrow / 8>(b, at + Shared::kBytesWide, 16 * j, step);
        multiply(sums[2 * j], a, b[0], b[1]);
        multiply(sums[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t m = wide + static_cast<int32_t>(column + lane / 4 + 8 * i);
    if (m >= p.wide.x.count) continue;
#pragma unroll
    for (int j = 0; j < kNarrow / 8; ++j) {
      const int32_t n = narrow + 8 * j + static_cast<int32_t>(lane % 4 * 2);
      if (n >= p.narrow.x.count) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (n + c >= p.narrow.x.count) continue;
        const float sum = sums[j][2 * i + c];
        if (p.num_parts == 1) {
          p.dw[matrix * p.dw_matrix + m * p.wide_stride + (n + c) * p.narrow_stride] += p.scale * sum;
        } else {
          const int64_t slice = static_cast<int64_t>(part) * p.rows.num_matrices + matrix;
          p.parts[(slice * p.wide.x.count + m) * p.narrow.x.count + n + c] = sum;
        }
      }
    }
  }
}

// dw += scale * the sum of the parts, in order
__global__ void __launch_bounds__(kLowRankThreads) add_parts_kernel(const __grid_constant__ Wgrad p) {
  const int64_t size = int64_t{p.wide.x.count} * p.narrow.x.count, all = size * p.rows.num_matrices;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kLowRankThreads + threadIdx.x;
  if (i >= all) return;
  float sum = 0;
  for (int32_t part = 0; part < p.num_parts; ++part) sum += p.parts[part * all + i];
  const int64_t matrix = i / size, m = i % size / p.narrow.x.count, n = i % p.narrow.x.count;
  p.dw[matrix * p.dw_matrix + m * p.wide_stride + n * p.narrow_stride] += p.scale * sum;
}

template <int kNarrow>
void launch(Stream& s, const Wgrad& p) {
  constexpr int kBytes = WgradShared<kNarrow>::kBytes;
  static_assert(kBytes <= kMinSharedBytes);
  MOEBIUS_CUDA(cudaFuncSetAttribute(wgrad_kernel<kNarrow>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto blocks = static_cast<unsigned>(p.rows.num_matrices * p.num_parts * p.narrow_tiles * p.wide_tiles);
  wgrad_kernel<kNarrow><<<blocks, kLowRankThreads, kBytes, cuda_stream(s)>>>(p);
}

}  // namespace

bool takes(const LowRankWgrad& a) {
  const LowRankWgradTiles cut(a);
  return takes_window(a.left_RM, a.left) && takes_window(a.right_RN, a.right) &&
         cut.matrices * cut.num_parts * cut.wide_tiles * cut.narrow_tiles < INT32_MAX &&
         cut.matrices * cut.wide_columns * cut.narrow_columns < int64_t{INT32_MAX} * kLowRankThreads;
}

void low_rank_wgrad(Stream& s, const LowRankWgrad& a) {
  const Matrices dw(a.dw_ePQ);
  const LowRankWgradTiles cut(a);
  const int32_t* token = index_of(a.rows.token_R);
  const Side left{window_of(a.left_RM, a.left), a.gather_left ? token : nullptr};
  const Side right{window_of(a.right_RN, a.right), a.gather_right ? token : nullptr};
  const Wgrad p{.dw = a.dw_ePQ.ptr<float>() + a.w_first * dw.cols,
                .dw_matrix = dw.rows * dw.cols,
                .wide_stride = cut.left_is_wide ? dw.cols : 1,
                .narrow_stride = cut.left_is_wide ? 1 : dw.cols,
                .wide = cut.left_is_wide ? left : right,
                .narrow = cut.left_is_wide ? right : left,
                .rows = {index_of(a.rows.offsets_e1), static_cast<int32_t>(dw.num), static_cast<int32_t>(cut.num_rows)},
                .wide_tiles = static_cast<int32_t>(cut.wide_tiles),
                .narrow_tiles = static_cast<int32_t>(cut.narrow_tiles),
                .num_parts = static_cast<int32_t>(cut.num_parts),
                .parts = a.scratch.empty() ? nullptr : static_cast<float*>(a.scratch.data),
                .scale = a.scale};
  if (cut.narrow == 64)
    launch<64>(s, p);
  else
    launch<32>(s, p);
  if (cut.num_parts > 1) {
    const int64_t all = cut.matrices * cut.wide_columns * cut.narrow_columns;
    add_parts_kernel<<<static_cast<unsigned>(div_ceil(all, int64_t{kLowRankThreads})), kLowRankThreads, 0,
                       cuda_stream(s)>>>(p);
  }
  check_launch("low_rank_wgrad");
}

}  // namespace moebius::cuda::sm80
