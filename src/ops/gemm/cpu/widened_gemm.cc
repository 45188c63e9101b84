#include "ops/gemm/cpu/widened_gemm.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <utility>

#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"
#include "ops/gemm/cpu/pack.h"
#include "ops/quantize/cpu/dequantize.h"

namespace moebius::cpu {
namespace {

// Without AVX-512, blocks have fewer k, so that a panel fits into a smaller cache (measured: 79 instead of 68 GFLOP/s
// per core of a Zen 3).
constexpr int64_t kBlockRows = 512, kBlockK = kNumLanes == 16 ? 512 : 256;
// kRoundedCols applies if C's block is kept in f32 until its rounding, since that needs space in the cache.
constexpr int64_t kBlockCols = 512, kRoundedCols = 256;
// Sums in registers: 24 of the 32 that AVX-512 has, 12 of the 16 before it.
constexpr int kKernelRows = kNumLanes == 16 ? 12 : 6, kKernelVectors = 2;
constexpr int64_t kTransposedRows = 6 * kRowPanel;  // of a strip of the transpose: long pieces of its rows are read
static_assert(kRowPanel % kKernelRows == 0);

static_assert(kPanelCols == kKernelVectors * kNumLanes);
using LooseLanes = float __attribute__((vector_size(kLaneBytes), aligned(4), may_alias));

// Packed A and B in f32, and the sums that are not yet rounded to bf16.
struct Blocks {
  alignas(64) float a[kTransposedRows * kBlockK];
  alignas(64) float b[kBlockK * kBlockCols];
  alignas(64) float c[std::max(kBlockRows * kRoundedCols, kTransposedRows* kBlockCols)];  // all rows, or a strip
  alignas(64) float edge[kKernelRows * kPanelCols];
};

// Rows of packed A for a kernel: element (i, p) is at data[i * row_stride + p * k_stride].
struct Strip {
  const float* data;
  int64_t row_stride, k_stride;
};

// Packed A: rows of kBlockK, or panels of kRowPanel rows from the transpose.
struct PackedRows {
  const float* data;
  bool transposed;
  int64_t k;

  Strip from(int64_t row) const {
    if (transposed) return {data + row / kRowPanel * kRowPanel * k + row % kRowPanel, 1, kRowPanel};
    return {data + row * kBlockK, kBlockK, 1};
  }
};

// c[kRows, kPanelCols] = or += a[kRows, k] times a panel
//
// All sums are in registers: GCC keeps the array there because its bounds are constant.
template <int kRows>
void kernel(float* c, int64_t ldc, bool add, Strip a, const float* panel, int64_t k) {
  Lanes sum[kRows][kKernelVectors] = {};
  for (int64_t p = 0; p < k; ++p, panel += kPanelCols) {
    const Lanes b0 = load_lanes(panel), b1 = load_lanes(panel + kNumLanes);
    for (int i = 0; i < kRows; ++i) {
      const float x = a.data[i * a.row_stride + p * a.k_stride];
      sum[i][0] += x * b0;
      sum[i][1] += x * b1;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKernelVectors; ++j) {
      auto* to = reinterpret_cast<LooseLanes*>(c + i * ldc + j * kNumLanes);
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

// Does the same as kernel(), for a last panel of fewer columns.
void edge_kernel(float* edge, float* c, int64_t ldc, bool add, Strip a, const float* panel, int64_t k, int64_t rows,
                 int64_t cols) {
  kKernels[rows - 1](edge, kPanelCols, false, a, panel, k);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) c[i * ldc + j] = (add ? c[i * ldc + j] : 0.0f) + edge[i * kPanelCols + j];
  }
}

// Computes a strip of rows of C from all panels of a block.
void multiply_strip(Blocks& blocks, float* c, int64_t ldc, bool add, PackedRows a, int64_t rows, int64_t cols,
                    int64_t k) {
  for (int64_t i = 0; i < rows; i += kKernelRows) {
    const int64_t kernel_rows = std::min<int64_t>(kKernelRows, rows - i);
    const Strip part = a.from(i);
    for (int64_t j = 0; j < cols; j += kPanelCols) {
      const float* panel = blocks.b + j * k;
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
PackedRows pack_rows(float* to, const Matrix& a, int64_t row, int64_t first_k, int64_t rows, int64_t k) {
  if (a.transposed)
    pack_panels<kRowPanel>(to, at<T>(a, row, first_k), a.ld, k, rows);
  else
    widen(to, kBlockK, at<T>(a, row, first_k), a.ld, rows, k);
  return {to, a.transposed, k};
}

// The elements of quantised matrices.
struct Quantised {};

template <>
PackedRows pack_rows<Quantised>(float* to, const Matrix& a, int64_t row, int64_t first_k, int64_t rows, int64_t k) {
  for (int64_t i = 0; i < rows; ++i) dequantize_row(to + i * kBlockK, *a.quantised, 0, a.first + row + i, first_k, k);
  return {to, false, k};
}

// Columns [col, col + cols) of rows [first_k, first_k + k) of b as panels.
template <class T>
void pack_columns(float* to, const Matrix& b, int64_t first_k, int64_t col, int64_t k, int64_t cols) {
  if (b.transposed)
    pack_panels_transposed(to, at<T>(b, first_k, col), b.ld, k, cols);
  else
    pack_panels<kPanelCols>(to, at<T>(b, first_k, col), b.ld, k, cols);
}

template <>
void pack_columns<Quantised>(float* to, const Matrix& b, int64_t first_k, int64_t col, int64_t k, int64_t cols) {
  // The values of a block, one MiB at most, as the transpose that panels are packed from.
  thread_local std::unique_ptr<float[]> values;
  if (!values) values = std::make_unique<float[]>(kBlockCols * kBlockK);
  for (int64_t j = 0; j < cols; ++j)
    dequantize_row(values.get() + j * k, *b.quantised, 0, b.first + col + j, first_k, k);
  pack_panels_transposed(to, static_cast<const float*>(values.get()), k, k, cols);
}

// Adds or stores rows of sums in bf16.
void round_rows(const TileGemm& g, const float* sums, int64_t ld, int64_t row, int64_t col, int64_t rows,
                int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
    bf16* c = static_cast<bf16*>(g.c.data) + (row + i) * g.c.ld + col;
    const float* from = sums + i * ld;
    if (g.accumulate) {
#pragma omp simd
      for (int64_t j = 0; j < cols; ++j) c[j] = to_bf16(to_f32(c[j]) + from[j]);
    } else {
#pragma omp simd
      for (int64_t j = 0; j < cols; ++j) c[j] = to_bf16(from[j]);
    }
  }
}

// Rows and columns of C.
struct Part {
  int64_t row, col, rows, cols;
};

// Computes a part of the product. Sums are stored in C, or in an f32 block until K is complete; the strips of the last
// K are rounded while they are in the cache.
template <class T>
void multiply_block(Blocks& blocks, const TileGemm& g, Part part) {
  const bool rounded = g.c.dtype == DType::bf16;
  float* const sums = rounded ? blocks.c : static_cast<float*>(g.c.data) + part.row * g.c.ld + part.col;
  const bool one_k = g.k <= kBlockK;  // then a strip needs no buffer for sums of earlier blocks
  const int64_t ld = !rounded ? g.c.ld : one_k ? kBlockCols : kRoundedCols;
  const int64_t strip_size = g.a.transposed ? kTransposedRows : kKernelRows;
  for (int64_t first_k = 0; first_k < g.k; first_k += kBlockK) {
    const int64_t k = std::min(kBlockK, g.k - first_k);
    const bool add = first_k > 0 || (g.accumulate && !rounded);
    pack_columns<T>(blocks.b, g.b, first_k, part.col, k, part.cols);
    for (int64_t i = 0; i < part.rows; i += strip_size) {
      const int64_t rows = std::min(strip_size, part.rows - i);
      float* const strip = sums + (rounded && one_k ? 0 : i * ld);
      multiply_strip(blocks, strip, ld, add, pack_rows<T>(blocks.a, g.a, part.row + i, first_k, rows, k), rows,
                     part.cols, k);
      if (rounded && first_k + k == g.k) round_rows(g, strip, ld, part.row + i, part.col, rows, part.cols);
    }
  }
}

Blocks& blocks_of_this_thread() {
  // Scratch of 2.3 MB, reused from call to call; it carries nothing from one to the next.
  // Zeroed, so that it is resident at once and the same whatever the shapes.
  thread_local const std::unique_ptr<Blocks> blocks(new Blocks());
  return *blocks;
}

}  // namespace

void widened_gemm(const TileGemm& g) {
  Blocks& blocks = blocks_of_this_thread();
  const int64_t block_cols = g.c.dtype == DType::bf16 && g.k > kBlockK ? kRoundedCols : kBlockCols;
  for (int64_t col = 0; col < g.n; col += block_cols) {
    for (int64_t row = 0; row < g.m; row += kBlockRows) {
      const Part part{row, col, std::min(kBlockRows, g.m - row), std::min(block_cols, g.n - col)};
      if (g.a.quantised) {
        multiply_block<Quantised>(blocks, g, part);
        continue;
      }
      with_float_type(g.a.dtype, [&](auto zero) { multiply_block<decltype(zero)>(blocks, g, part); });
    }
  }
}

}  // namespace moebius::cpu
