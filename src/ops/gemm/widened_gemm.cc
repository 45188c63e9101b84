#include "ops/gemm/widened_gemm.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <utility>

#include "ops/cpu/vector.h"
#include "ops/gemm/pack.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kBlockRows = 512, kBlockCols = 256, kBlockK = 256;
constexpr int64_t kStripRows = 96;
constexpr int kKernelRows = 12, kKernelVectors = 2;

using Lanes = float __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int64_t kLanes = 16;
static_assert(kKernelVectors * kLanes == kPanelCols);

// Packed A or B, in f32, and where C's block waits in f32 for its rounding.
struct Blocks {
  alignas(64) float a[kStripRows * kBlockK];
  alignas(64) float b[kBlockK * kBlockCols];
  alignas(64) float c[kBlockRows * kBlockCols];
  alignas(64) float edge[kKernelRows * kPanelCols];
};

// Rows of packed A: element (i, p) is at data[i * row_stride + p * k_stride].
struct Strip {
  const float* data;
  int64_t row_stride, k_stride;
};

// c[kRows, 32] = or += a[kRows, k] times a panel. All sums live in registers: GCC keeps the array there as its bounds
// are constant.
template <int kRows>
void kernel(float* c, int64_t ldc, bool add, Strip a, const float* panel, int64_t k) {
  Lanes sum[kRows][kKernelVectors] = {};
  for (int64_t p = 0; p < k; ++p, panel += kPanelCols) {
    const Lanes b0 = *reinterpret_cast<const Lanes*>(panel), b1 = *reinterpret_cast<const Lanes*>(panel + kLanes);
    for (int i = 0; i < kRows; ++i) {
      const float x = a.data[i * a.row_stride + p * a.k_stride];
      const Lanes xs = {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};  // a broadcast from memory, unlike Lanes{} + x
      sum[i][0] += xs * b0;
      sum[i][1] += xs * b1;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKernelVectors; ++j) {
      auto* to = reinterpret_cast<Lanes*>(c + i * ldc + j * kLanes);
      *to = add ? *to + sum[i][j] : sum[i][j];
    }
  }
}

using Kernel = void (*)(float*, int64_t, bool, Strip, const float*, int64_t);

template <size_t... i>
constexpr std::array<Kernel, sizeof...(i)> kernels_of(std::index_sequence<i...>) {
  return {kernel<static_cast<int>(i) + 1>...};
}
constexpr auto kKernels = kernels_of(std::make_index_sequence<kKernelRows>());

// As kernel, for a last panel of fewer columns.
void edge_kernel(float* edge, float* c, int64_t ldc, bool add, Strip a, const float* panel, int64_t k, int64_t rows,
                 int64_t cols) {
  kKernels[rows - 1](edge, kPanelCols, false, a, panel, k);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) c[i * ldc + j] = (add ? c[i * ldc + j] : 0.0f) + edge[i * kPanelCols + j];
  }
}

// A strip of rows of C times all panels of a block.
void multiply_strip(Blocks& blocks, float* c, int64_t ldc, bool add, Strip a, int64_t rows, int64_t cols, int64_t k) {
  for (int64_t j = 0; j < cols; j += kPanelCols) {
    const float* panel = blocks.b + j * k;
    for (int64_t i = 0; i < rows; i += kKernelRows) {
      const int64_t kernel_rows = std::min<int64_t>(kKernelRows, rows - i);
      const Strip part{a.data + i * a.row_stride, a.row_stride, a.k_stride};
      float* to = c + i * ldc + j;
      if (cols - j >= kPanelCols)
        kKernels[kernel_rows - 1](to, ldc, add, part, panel, k);
      else
        edge_kernel(blocks.edge, to, ldc, add, part, panel, k, kernel_rows, cols - j);
    }
  }
}

template <class T>
const T* at(const Matrix& x, int64_t row, int64_t col) {
  return static_cast<const T*>(x.data) + (x.transposed ? col * x.ld + row : row * x.ld + col);
}

template <class T>
Strip pack_strip(float* to, const Matrix& a, int64_t row, int64_t first_k, int64_t rows, int64_t k) {
  if (a.transposed) {
    widen(to, kStripRows, at<T>(a, row, first_k), a.ld, k, rows);
    return {to, 1, kStripRows};
  }
  widen(to, kBlockK, at<T>(a, row, first_k), a.ld, rows, k);
  return {to, kBlockK, 1};
}

// c[rows, cols] in f32 from rows `row`... and columns `col`... of the product.
template <class T>
void multiply_block(Blocks& blocks, float* c, int64_t ldc, bool accumulate, const TileGemm& g, int64_t row, int64_t col,
                    int64_t rows, int64_t cols) {
  for (int64_t first_k = 0; first_k < g.k; first_k += kBlockK) {
    const int64_t k = std::min(kBlockK, g.k - first_k);
    if (g.b.transposed)
      pack_panels_transposed(blocks.b, at<T>(g.b, first_k, col), g.b.ld, k, cols);
    else
      pack_panels(blocks.b, at<T>(g.b, first_k, col), g.b.ld, k, cols);
    for (int64_t i = 0; i < rows; i += kStripRows) {
      const int64_t strip_rows = std::min(kStripRows, rows - i);
      const Strip a = pack_strip<T>(blocks.a, g.a, row + i, first_k, strip_rows, k);
      multiply_strip(blocks, c + i * ldc, ldc, accumulate || first_k > 0, a, strip_rows, cols, k);
    }
  }
}

// Adds or stores a block in bf16.
void round_block(const TileGemm& g, const float* block, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
    bf16* c = static_cast<bf16*>(g.c.data) + (row + i) * g.c.ld + col;
    const float* from = block + i * kBlockCols;
    if (g.accumulate) {
#pragma omp simd
      for (int64_t j = 0; j < cols; ++j) c[j] = to_bf16(to_f32(c[j]) + from[j]);
    } else {
#pragma omp simd
      for (int64_t j = 0; j < cols; ++j) c[j] = to_bf16(from[j]);
    }
  }
}

Blocks& blocks_of_this_thread() {
  // Scratch of 0.9 MB, reused from call to call; it carries nothing from one to the next.
  thread_local const std::unique_ptr<Blocks> blocks(new Blocks);
  return *blocks;
}

}  // namespace

void widened_gemm(const TileGemm& g) {
  Blocks& blocks = blocks_of_this_thread();
  for (int64_t col = 0; col < g.n; col += kBlockCols) {
    const int64_t cols = std::min(kBlockCols, g.n - col);
    for (int64_t row = 0; row < g.m; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, g.m - row);
      with_float_type(g.a.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (g.c.dtype == DType::f32) {
          multiply_block<T>(blocks, static_cast<float*>(g.c.data) + row * g.c.ld + col, g.c.ld, g.accumulate, g, row,
                            col, rows, cols);
        } else {
          multiply_block<T>(blocks, blocks.c, kBlockCols, false, g, row, col, rows, cols);
          round_block(g, blocks.c, row, col, rows, cols);
        }
      });
    }
  }
}

}  // namespace moebius::cpu
