// The low-rank products for any shape in f32 or bf16, with f32 sums. A block of 256 threads owns a tile of 64 x 32 of
// one expert: each thread has 4 x 2 sums. Operands are widened to f32 in shared memory, 32 of k at a time. A sum runs
// over k in order and does not depend on other rows.
#include "ops/low_rank/cuda/low_rank.h"

#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kRows = 64, kCols = 32, kDepth = 32, kThreadRows = 4, kThreadCols = 2;

struct Slices {
  float left[kDepth][kRows + 4], right[kDepth][kCols + 4];
};
using Sums = float[kThreadRows][kThreadCols];

__device__ int thread_row() { return threadIdx.x / 16 * kThreadRows; }
__device__ int thread_col() { return threadIdx.x % 16 * kThreadCols; }

__device__ void multiply(const Slices& s, Sums& sums) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadCols; ++j) sums[i][j] += s.left[k][thread_row() + i] * s.right[k][thread_col() + j];
    }
  }
}

// slice[k][i] = at(i, k). With kAlongK neighbouring threads have neighbouring k, else neighbouring i.
template <bool kAlongK, int kWidth, class At>
__device__ void load_slice(float (&slice)[kDepth][kWidth + 4], At&& at) {
#pragma unroll
  for (int j = 0; j < kWidth * kDepth / kThreads; ++j) {
    const int t = threadIdx.x + j * kThreads;
    const int k = kAlongK ? t % kDepth : t / kWidth, i = kAlongK ? t / kDepth : t % kWidth;
    slice[k][i] = at(i, k);
  }
}

// Rows [begin, end) of one expert. Without offsets one expert has all rows.
struct RowTile {
  int expert = -1;
  int64_t begin = 0, end = 0;
};
__device__ RowTile row_tile(const int32_t* offsets, int num_experts, int64_t num_rows, int64_t index) {
  for (int e = 0; e < num_experts; ++e) {
    const int64_t begin = offsets ? offsets[e] : 0, end = offsets ? offsets[e + 1] : num_rows;
    const int64_t tiles = (end - begin + kRows - 1) / kRows;
    if (index < tiles) return {e, begin + index * kRows, min(begin + (index + 1) * kRows, end)};
    index -= tiles;
  }
  return {};
}

// A window of columns: x[r * ld + c] from its first column on.
template <class T>
struct Window {
  T* data;
  int64_t ld, count;
};

template <class T>
struct Product {
  Window<T> y;
  Window<const T> x;
  const T* w;  // from its first row on
  int64_t w_expert, w_ld;
  const int32_t *offsets, *token;
  int num_experts;
  int64_t num_rows;
  bool accumulate;
  float scale;
};

template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) product_kernel(Product<T> p) {
  const RowTile tile = row_tile(p.offsets, p.num_experts, p.num_rows, blockIdx.x);
  if (tile.expert < 0) return;
  __shared__ Slices s;
  const T* w = p.w + tile.expert * p.w_expert;
  const int64_t col = static_cast<int64_t>(blockIdx.y) * kCols;
  Sums sums = {};
  for (int64_t k0 = 0; k0 < p.x.count; k0 += kDepth) {
    __syncthreads();
    load_slice<true, kRows>(s.left, [&](int i, int k) {
      const int64_t r = tile.begin + i;
      if (r >= tile.end || k0 + k >= p.x.count) return 0.0f;
      return element(p.x.data[(p.token ? p.token[r] : r) * p.x.ld + k0 + k]);
    });
    load_slice<!kTransposed, kCols>(s.right, [&](int i, int k) {
      if (col + i >= p.y.count || k0 + k >= p.x.count) return 0.0f;
      return element(kTransposed ? w[(k0 + k) * p.w_ld + col + i] : w[(col + i) * p.w_ld + k0 + k]);
    });
    __syncthreads();
    multiply(s, sums);
  }
  for (int i = 0; i < kThreadRows; ++i) {
    const int64_t r = tile.begin + thread_row() + i;
    for (int j = 0; j < kThreadCols && r < tile.end; ++j) {
      const int64_t c = col + thread_col() + j;
      if (c >= p.y.count) break;
      T& to = p.y.data[r * p.y.ld + c];
      set(to, (p.accumulate ? element(to) : 0.0f) + p.scale * sums[i][j]);
    }
  }
}

template <class T>
struct Wgrad {
  float* dw;  // from its first row on
  int64_t dw_expert, dw_ld;
  Window<const T> left, right;
  const int32_t *offsets, *left_token, *right_token;
  int64_t num_rows;
  float scale;
};

template <class T>
__global__ void __launch_bounds__(kThreads) wgrad_kernel(Wgrad<T> p) {
  const int64_t e = blockIdx.z, begin = p.offsets ? p.offsets[e] : 0, end = p.offsets ? p.offsets[e + 1] : p.num_rows;
  if (begin == end) return;
  __shared__ Slices s;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kRows, col = static_cast<int64_t>(blockIdx.x) * kCols;
  const auto at = [&](const Window<const T>& x, const int32_t* token, int64_t r, int64_t c) {
    return r < end && c < x.count ? element(x.data[(token ? token[r] : r) * x.ld + c]) : 0.0f;
  };
  Sums sums = {};
  for (int64_t r0 = begin; r0 < end; r0 += kDepth) {
    __syncthreads();
    load_slice<false, kRows>(s.left, [&](int i, int k) { return at(p.left, p.left_token, r0 + k, row + i); });
    load_slice<false, kCols>(s.right, [&](int i, int k) { return at(p.right, p.right_token, r0 + k, col + i); });
    __syncthreads();
    multiply(s, sums);
  }
  float* dw = p.dw + e * p.dw_expert;
  for (int i = 0; i < kThreadRows && row + thread_row() + i < p.left.count; ++i) {
    for (int j = 0; j < kThreadCols && col + thread_col() + j < p.right.count; ++j)
      dw[(row + thread_row() + i) * p.dw_ld + col + thread_col() + j] += p.scale * sums[i][j];
  }
}

const int32_t* index_of(const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); }

// The sizes of one matrix, or of one of each expert.
struct Matrices {
  explicit Matrices(const Tensor& w)
      : num(w.shape.rank() == 3 ? w.dim(0) : 1), rows(w.dim(w.shape.rank() - 2)), cols(w.dim(w.shape.rank() - 1)) {}
  int64_t num, rows, cols;
};

}  // namespace

void generic::low_rank_product(Stream& s, const LowRankProduct& a) {
  const Matrices w(a.w_ePQ);
  const int64_t R = a.y_RM.dim(0);
  with_float_type(a.y_RM.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Product<T> p{.y = {a.y_RM.ptr<T>() + a.y.first, a.y_RM.dim(1), a.y.count},
                       .x = {a.x_TK.ptr<T>() + a.x.first, a.x_TK.dim(1), a.x.count},
                       .w = a.w_ePQ.ptr<T>() + a.w_first * w.cols,
                       .w_expert = w.rows * w.cols,
                       .w_ld = w.cols,
                       .offsets = index_of(a.rows.offsets_e1),
                       .token = index_of(a.rows.token_R),
                       .num_experts = static_cast<int>(w.num),
                       .num_rows = R,
                       .accumulate = a.accumulate,
                       .scale = a.scale};
    const dim3 grid(static_cast<unsigned>(R / kRows + w.num),
                    static_cast<unsigned>(div_ceil(a.y.count, int64_t{kCols})));
    if (a.transposed)
      product_kernel<T, true><<<grid, kThreads, 0, cuda_stream(s)>>>(p);
    else
      product_kernel<T, false><<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  });
  check_launch("low_rank_product");
}

void generic::low_rank_wgrad(Stream& s, const LowRankWgrad& a) {
  const Matrices dw(a.dw_ePQ);
  with_float_type(a.left_RM.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int32_t* token = index_of(a.rows.token_R);
    const Wgrad<T> p{.dw = a.dw_ePQ.ptr<float>() + a.w_first * dw.cols,
                     .dw_expert = dw.rows * dw.cols,
                     .dw_ld = dw.cols,
                     .left = {a.left_RM.ptr<T>() + a.left.first, a.left_RM.dim(1), a.left.count},
                     .right = {a.right_RN.ptr<T>() + a.right.first, a.right_RN.dim(1), a.right.count},
                     .offsets = index_of(a.rows.offsets_e1),
                     .left_token = a.gather_left ? token : nullptr,
                     .right_token = a.gather_right ? token : nullptr,
                     .num_rows = a.gather_left ? a.right_RN.dim(0) : a.left_RM.dim(0),
                     .scale = a.scale};
    const dim3 grid(static_cast<unsigned>(div_ceil(a.right.count, int64_t{kCols})),
                    static_cast<unsigned>(div_ceil(a.left.count, int64_t{kRows})), static_cast<unsigned>(dw.num));
    wgrad_kernel<T><<<grid, kThreads, 0, cuda_stream(s)>>>(p);
  });
  check_launch("low_rank_wgrad");
}

void low_rank_product(Stream& s, const LowRankProduct& a) {
  if (sm80::takes(a)) return sm80::low_rank_product(s, a);
  generic::low_rank_product(s, a);
}

void low_rank_wgrad(Stream& s, const LowRankWgrad& a) {
  if (sm80::takes(a)) return sm80::low_rank_wgrad(s, a);
  generic::low_rank_wgrad(s, a);
}

}  // namespace moebius::cuda
