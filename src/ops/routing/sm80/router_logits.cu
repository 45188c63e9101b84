// The gate's products with mma.sync: out[m, n] = sum over k of a(m, k) b(n, k), with operands that are sums of bf16
// terms (cuda/router_logits.h).
//   logits  m tokens, n experts, k of D         a = x, b = w: 3 terms, or 1 when w is bf16
//   dw      m of D, n experts, k tokens         a = x, b = dlogits: 3 terms; in parts of k
//   dx      m tokens, n of D, k experts         a = dlogits: 2 terms, b = w: as many, or 1 when w is bf16, since dx is
//                                               rounded to bf16
// A block of 8 warps has tiles of 128 x 64, and a warp 32 x 32 of these. Tensor cores truncate their sums instead of
// rounding them. So they sum 32 of k at a time, and these sums are added to others in registers.
#include <algorithm>

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/routing/cuda/router_logits.h"
#include "ops/sm80/elements.h"
#include "ops/sm80/fragments.h"
#include "ops/sm80/pairs.h"

namespace moebius::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kRows = 128, kColumns = 64, kDepth = 32, kSlots = 3, kBlocks = 2;  // of a multiprocessor

enum class Gate { logits, dx, dw };

template <Gate kGate, int kNumTerms>
struct Layout {
  static constexpr int kTermsA = kGate == Gate::dx ? 2 : 1, kTermsB = kNumTerms;
  static constexpr Major kMajorA = kGate == Gate::dw ? Major::mn : Major::k;
  static constexpr Major kMajorB = kGate == Gate::logits ? Major::k : Major::mn;
  static constexpr int kTermBytesA = kRows * kDepth * 2, kTermBytesB = kColumns * kDepth * 2;
  static constexpr int kBytesA = kTermsA * kTermBytesA, kSlotBytes = kBytesA + kTermsB * kTermBytesB;
};

struct Extent {
  int64_t rows, columns, depth;  // m, n, k
  const float* bias = nullptr;   // of the columns of the logits; null: none
  int tiles_m, tiles_n, parts, steps_of_part;
};

struct Tile {
  int m, n, part, first_step, num_steps;
};

// Neighbouring tiles share rows of a.
__device__ Tile tile_at(const Extent& e, int i) {
  const int n = i % e.tiles_n, m = i / e.tiles_n % e.tiles_m, part = i / e.tiles_n / e.tiles_m;
  const int all = static_cast<int>((e.depth + kDepth - 1) / kDepth), first = min(part * e.steps_of_part, all);
  return {m * kRows, n * kColumns, part, first, min(e.steps_of_part, all - first)};
}

// An operand, and the bytes of its rows that are copied at a time (ops/sm80/elements.h).
struct Rows {
  explicit Rows(const GateOperand& x) : x(x), unit(copy_unit(x.data, x.width)) {}
  GateOperand x;
  uint32_t unit;
};

// The tile of an operand with kWidth rows or columns from `first` on, kDepth deep from k on; zeros outside.
template <Major kMajor, int kWidth, int kTerms, int kTermBytes>
__device__ __forceinline__ void copy_operand(uint32_t to, const Rows& rows, int first, int k) {
  const GateOperand& x = rows.x;
  constexpr int kTileRows = kMajor == Major::k ? kWidth : kDepth, kChunks = (kMajor == Major::k ? kDepth : kWidth) / 8;
  static_assert(kTileRows * kChunks % kThreads == 0);
  const int64_t first_row = kMajor == Major::k ? first : k, first_column = kMajor == Major::k ? k : first;
  if (kTerms == 1 && rows.unit != 16) {  // rows of terms are padded
#pragma unroll 1
    for (int i = 0; i < kTileRows * kChunks / kThreads; ++i) {
      const uint32_t at = threadIdx.x + i * kThreads, row = at / kChunks, chunk = at % kChunks;
      const int64_t left = x.width - first_column - 8 * chunk;
      const bool valid = first_row + row < x.rows && left > 0;
      const bf16* from = x.data + (valid ? (first_row + row) * x.width + first_column + 8 * chunk : 0);
      copy_elements(to + swizzled<kChunks>(row, chunk), reinterpret_cast<const char*>(from),
                    valid ? static_cast<int32_t>(min(left, int64_t{8})) : 0, rows.unit);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTileRows * kChunks / kThreads; ++i) {
    const uint32_t at = threadIdx.x + i * kThreads, row = at / kChunks, chunk = at % kChunks;
    const bool valid = first_row + row < x.rows && first_column + 8 * chunk < x.width;
    const bf16* from = x.data + (valid ? (first_row + row) * x.width + first_column + 8 * chunk : 0);
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      copy_16(to + term * kTermBytes + swizzled<kChunks>(row, chunk), from + (valid ? term * x.rows * x.width : 0),
              valid);
  }
}

// The sums of a warp, as in mma.h: [i][j] is the tile of 16 x 8 at row 16 i and column 8 j.
using Sums = float[2][4][4];

// product += that of a slot, small terms first in each step of 16.
template <class L>
__device__ __forceinline__ void multiply_slot(Sums& product, uint32_t slot, uint32_t row, uint32_t column) {
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    uint32_t a[L::kTermsA][2][4];
#pragma unroll
    for (int p = 0; p < L::kTermsA; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t tile = slot + p * L::kTermBytesA;
        if constexpr (L::kMajorA == Major::k)
          load_a_along_k<kDepth / 8>(a[p][i], tile, row + 16 * i, step);
        else
          load_a_across_k<kRows / 8>(a[p][i], tile, row + 16 * i, step);
      }
    }
#pragma unroll
    for (int q = L::kTermsB - 1; q >= 0; --q) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t b[4];
        const uint32_t tile = slot + L::kBytesA + q * L::kTermBytesB;
        if constexpr (L::kMajorB == Major::k)
          load_b_along_k<kDepth / 8>(b, tile, column + 16 * j, step);
        else
          load_b_across_k<kColumns / 8>(b, tile, column + 16 * j, step);
#pragma unroll
        for (int p = L::kTermsA - 1; p >= 0; --p) {
          if (p + q >= (L::kTermsA > L::kTermsB ? L::kTermsA : L::kTermsB)) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply(product[i][2 * j], a[p][i], b[0], b[1]);
            multiply(product[i][2 * j + 1], a[p][i], b[2], b[3]);
          }
        }
      }
    }
  }
}

// Writes two neighbouring columns of a row of out. The second one may be past the last column.
template <Gate kGate>
__device__ __forceinline__ void put(void* out, const Extent& e, int part, int64_t row, int64_t column, float x,
                                    float y) {
  if constexpr (kGate == Gate::dx) {
    if (e.columns % 2 == 0) {
      uint32_t* word = static_cast<uint32_t*>(out) + (row * e.columns + column) / 2;
      *word = pack_pair(low_of(*word) + x, high_of(*word) + y);
      return;
    }
    bf16* to = static_cast<bf16*>(out) + row * e.columns + column;
    set(to[0], element(to[0]) + x);
    if (column + 1 < e.columns) set(to[1], element(to[1]) + y);
  } else if constexpr (kGate == Gate::logits) {
    float* to = static_cast<float*>(out) + row * e.columns + column;
    to[0] = e.bias ? x + e.bias[column] : x;
    if (column + 1 < e.columns) to[1] = e.bias ? y + e.bias[column + 1] : y;
  } else {
    float* to = static_cast<float*>(out) + (part * e.columns + column) * e.rows + row;  // eight lanes write neighbours
    to[0] = x;
    if (column + 1 < e.columns) to[e.rows] = y;
  }
}

template <Gate kGate, int kTerms>
__global__ void __launch_bounds__(kThreads, kBlocks)
    product_kernel(const __grid_constant__ Rows a, const __grid_constant__ Rows b, Extent e, void* out) {
  using L = Layout<kGate, kTerms>;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t slots = shared_address(shared), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t row = warp / 2 * 32, column = warp % 2 * 32;
  for (int i = blockIdx.x; i < e.tiles_m * e.tiles_n * e.parts; i += gridDim.x) {
    const Tile t = tile_at(e, i);
    // Fills the slot of a step, if there is one. It closes a group of copies in any case.
    const auto fill = [&](int step) {
      if (step < t.num_steps) {
        const int k = (t.first_step + step) * kDepth;
        const uint32_t slot = slots + step % kSlots * L::kSlotBytes;
        copy_operand<L::kMajorA, kRows, L::kTermsA, L::kTermBytesA>(slot, a, t.m, k);
        copy_operand<L::kMajorB, kColumns, L::kTermsB, L::kTermBytesB>(slot + L::kBytesA, b, t.n, k);
      }
      commit_copies();
    };
    for (int step = 0; step < kSlots - 1; ++step) fill(step);
    Sums sum = {};
    for (int step = 0; step < t.num_steps; ++step) {
      wait_copies<kSlots - 2>();
      __syncthreads();
      fill(step + kSlots - 1);
      Sums product = {};
      multiply_slot<L>(product, slots + step % kSlots * L::kSlotBytes, row, column);
#pragma unroll
      for (int n = 0; n < 2 * 4 * 4; ++n) sum[n / 16][n / 4 % 4][n % 4] += product[n / 16][n / 4 % 4][n % 4];
    }
    __syncthreads();  // all have read the slots, before those of the next tile are filled
#pragma unroll
    for (int n = 0; n < 2 * 4 * 2; ++n) {
      const int tile_row = n / 8, tile_column = n / 2 % 4, half = n % 2;
      const int64_t at_row = t.m + row + 16 * tile_row + 8 * half + lane / 4;
      const int64_t at_column = t.n + column + 8 * tile_column + lane % 4 * 2;
      if (at_row >= e.rows || at_column >= e.columns) continue;
      const float(&x)[4] = sum[tile_row][tile_column];
      put<kGate>(out, e, t.part, at_row, at_column, x[2 * half], x[2 * half + 1]);
    }
  }
  wait_copies<0>();
}

template <Gate kGate, int kTerms>
void launch(Stream& s, const GateOperand& a, const GateOperand& b, Extent e, void* out) {
  constexpr int kBytes = kSlots * Layout<kGate, kTerms>::kSlotBytes;
  static_assert(kBytes <= kMinSharedBytes);
  e.tiles_m = static_cast<int>(div_ceil(e.rows, kRows));
  e.tiles_n = static_cast<int>(div_ceil(e.columns, kColumns));
  e.steps_of_part = static_cast<int>(div_ceil(div_ceil(e.depth, kDepth), e.parts));
  const int tiles = e.tiles_m * e.tiles_n * e.parts;
  if (tiles == 0) return;
  const GpuLimits& limits = gpu_limits(s);
  const auto blocks_each = std::min(kBlocks, narrow<int>(limits.blocks_together(kBytes)));
  const int blocks = std::min(tiles, limited_blocks(s, limits.num_multiprocessors * blocks_each));
  const auto kernel = product_kernel<kGate, kTerms>;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, cuda_stream(s)>>>(Rows(a), Rows(b), e, out);
  check_launch("router_logits");
}

}  // namespace

void router_logits_on_tensor_cores(Stream& s, const RouterLogitsFwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  const GateScratch scratch(a.scratch.data, a.x_TD, a.w_ED, false);
  const GateOperand x{a.x_TD.ptr<bf16>(), T, D};
  const Extent e{.rows = T, .columns = E, .depth = D, .bias = bias_of(a), .parts = 1};
  float* logits = a.logits_TE.ptr<float>();
  if (a.w_ED.dtype == DType::bf16) return launch<Gate::logits, 1>(s, x, {a.w_ED.ptr<bf16>(), E, D}, e, logits);
  split_terms(s, scratch.w_3ED, a.w_ED.ptr<float>(), E, D, scratch.d, kNumTerms);
  launch<Gate::logits, kNumTerms>(s, x, {scratch.w_3ED, E, scratch.d}, e, logits);
}

void router_grads_on_tensor_cores(Stream& s, const RouterLogitsBwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  const GateScratch scratch(a.scratch.data, a.x_TD, a.w_ED, true);
  const GateOperand x{a.x_TD.ptr<bf16>(), T, D}, dlogits{scratch.dlogits_3TE, T, scratch.e};
  split_terms(s, scratch.dlogits_3TE, a.dlogits_TE.ptr<float>(), T, E, scratch.e, kNumTerms);
  if (!a.dw_ED.empty()) {
    const Extent e{.rows = D, .columns = E, .depth = T, .parts = static_cast<int>(a.partial_PED.dim(0))};
    launch<Gate::dw, kNumTerms>(s, x, dlogits, e, a.partial_PED.ptr<float>());
  }
  if (a.dx_TD.empty()) return;
  const Extent e{.rows = T, .columns = D, .depth = E, .parts = 1};
  if (a.w_ED.dtype == DType::bf16) return launch<Gate::dx, 1>(s, dlogits, {a.w_ED.ptr<bf16>(), E, D}, e, a.dx_TD.data);
  split_terms(s, scratch.w_3ED, a.w_ED.ptr<float>(), E, D, scratch.d, 2);
  launch<Gate::dx, 2>(s, dlogits, {scratch.w_3ED, E, scratch.d}, e, a.dx_TD.data);
}

}  // namespace moebius::cuda::sm80
