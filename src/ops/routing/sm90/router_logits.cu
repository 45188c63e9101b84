// The gate's products on the tensor cores: out[m, n] = sum over k of a(m, k) b(n, k), operands as
// sums of bf16 terms (cuda/router_logits.h).
//   logits  m tokens, n experts, k of D         a = x, b = w: 3 terms, or 1 when w is bf16
//   dw      m of D, n experts, k tokens         a = x, b = dlogits: 3 terms; in parts of k
//   dx      m tokens, n of D, k experts         a = dlogits: 2 terms, b = w: as many, or 1 when w is bf16, since dx is
//                                               rounded to bf16; only where sm90/router_dx.cu does not compute it
// A block has a copying warp and two warpgroups that multiply; it takes tile after tile of 128
// rows, half for each. Shared memory is a ring of stages, each 64 deep in k. Tensor cores truncate their
// sums instead of rounding them. So they sum one stage at a time, and these sums are added to others in
// registers. The sums of dx, which is rounded to bf16, stay in the tensor cores.
#include <algorithm>

#include "ops/routing/cuda/router_terms.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = kMultipliers + 32;
constexpr int kSharedBytes = 200 * 1024;

enum class Gate { logits, dx, dw };

template <Gate kGate, int kNumColumns, int kTerms>
struct Layout {
  static constexpr int kColumns = kNumColumns;
  static constexpr int kTermsA = kGate == Gate::dx ? 2 : 1, kTermsB = kTerms;
  static constexpr Major kMajorA = kGate == Gate::dw ? Major::mn : Major::k;
  static constexpr Major kMajorB = kGate == Gate::logits ? Major::k : Major::mn;
  static constexpr int kBytesA = kTermsA * kGateRows * 128, kBytesB = kTermsB * kColumns * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB, kStages = kSharedBytes / kStageBytes;
  // The starts of the terms of an operand, in bytes from its first.
  static constexpr int kTermBytesA = kGateRows * 128;
  static constexpr int kTermBytesB = kMajorB == Major::k ? kColumns * 128 : kBoxBytes;
  static constexpr int kSums = kColumns / 2;  // of a thread
};

struct Extent {
  int64_t rows, columns, depth;  // m, n, k
  const float* bias = nullptr;   // of the columns of the logits; null: none
  int tiles_m, tiles_n, parts, stages_per_part;
};

struct Tile {
  int m, n, part, first_stage, num_stages;
};

// Returns the i-th tile. Consecutive tiles share rows of a.
__device__ Tile tile_at(const Extent& e, int columns, int i) {
  const int n = i % e.tiles_n, m = i / e.tiles_n % e.tiles_m, part = i / e.tiles_n / e.tiles_m;
  const int all = static_cast<int>((e.depth + kGateDepth - 1) / kGateDepth);
  const int first = min(part * e.stages_per_part, all);
  return {m * kGateRows, n * columns, part, first, min(e.stages_per_part, all - first)};
}

struct Barriers {
  uint32_t full, empty;  // 8 bytes for each stage
};

template <class L>
__device__ void copy_stage(const CUtensorMap* a, const CUtensorMap* b, const Tile& t, int k, uint32_t to,
                           uint32_t full) {
  mbarrier_arrive_expect(full, L::kStageBytes);
  if constexpr (L::kMajorA == Major::k) {
    tma_load(to, a, full, k, t.m, 0);
  } else {
    for (int g = 0; g < kGateGroups; ++g) tma_load(to + g * kBoxBytes, a, full, t.m + g * 64, k, 0);
  }
  const uint32_t to_b = to + L::kBytesA;
  if constexpr (L::kMajorB == Major::k) {
    tma_load(to_b, b, full, k, t.n, 0);
  } else {
    for (int j = 0; j < L::kColumns / 64; ++j) tma_load(to_b + j * L::kTermsB * kBoxBytes, b, full, t.n + j * 64, k, 0);
  }
}

// sum (+)= the products of a stage, small terms first.
template <class L>
__device__ void multiply_stage(float (&sum)[L::kSums], uint32_t stage, int group, bool accumulate) {
  constexpr int kStepA = L::kMajorA == Major::k ? 32 : 2048, kStepB = L::kMajorB == Major::k ? 32 : 2048;
  const uint64_t a = wgmma_operand<L::kMajorA>(stage + group * kBoxBytes);
  const uint64_t b = wgmma_operand<L::kMajorB>(stage + L::kBytesA, L::kTermsB * kBoxBytes);
#pragma unroll
  for (int p = L::kTermsA - 1; p >= 0; --p) {
#pragma unroll
    for (int q = L::kTermsB - 1; q >= 0; --q) {
      if (p + q >= (L::kTermsA > L::kTermsB ? L::kTermsA : L::kTermsB)) continue;
#pragma unroll
      for (int k = 0; k < kGateDepth / 16; ++k) {
        Wgmma<L::kMajorA, L::kMajorB>::multiply(sum, a + ((p * L::kTermBytesA + k * kStepA) >> 4),
                                                b + ((q * L::kTermBytesB + k * kStepB) >> 4), accumulate);
        accumulate = true;
      }
    }
  }
}

// The position of a thread's sums: sum[4 j + 2 i + c] is (row + 8 i, column + 8 j + c).
struct Place {
  int64_t row, column;
};

template <int kSums>
__device__ void add_bias(const Extent& e, const Place& at, float (&sum)[kSums]) {
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
    const int64_t column = at.column + 8 * (n / 4) + n % 2;
    if (column < e.columns) sum[n] += e.bias[column];
  }
}

template <int kSums>
__device__ void write_logits(float* out, const Extent& e, const Place& at, const float (&sum)[kSums]) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = at.row + 8 * i, column = at.column + 8 * j;
      if (row >= e.rows || column >= e.columns) continue;
      float* to = out + row * e.columns + column;
      if (e.columns % 2 == 0) {
        *reinterpret_cast<float2*>(to) = {sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]};
      } else {
        to[0] = sum[4 * j + 2 * i];
        if (column + 1 < e.columns) to[1] = sum[4 * j + 2 * i + 1];
      }
    }
  }
}

// partial[n, m]: eight threads write eight neighbours.
template <int kSums>
__device__ void write_partial(float* out, const Extent& e, const Place& at, const float (&sum)[kSums]) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = at.row + 8 * (i / 2), column = at.column + 8 * j + i % 2;
      if (row < e.rows && column < e.columns) out[column * e.rows + row] = sum[4 * j + i];
    }
  }
}

// The words of dx that a thread adds to. They are loaded before its sums are computed. Columns are in pairs, since D %
// 8 == 0.
template <int kSums>
__device__ void load_dx(const uint32_t* dx, const Extent& e, const Place& at, uint32_t (&word)[kSums / 2]) {
#pragma unroll
  for (int j = 0; j < kSums / 2; ++j) {
    const int64_t row = at.row + 8 * (j % 2), column = at.column + 8 * (j / 2);
    word[j] = row < e.rows && column < e.columns ? dx[(row * e.columns + column) / 2] : 0;
  }
}
template <int kSums>
__device__ void add_to_dx(uint32_t* dx, const Extent& e, const Place& at, const float (&sum)[kSums],
                          const uint32_t (&word)[kSums / 2]) {
#pragma unroll
  for (int j = 0; j < kSums / 2; ++j) {
    const int64_t row = at.row + 8 * (j % 2), column = at.column + 8 * (j / 2);
    const uint32_t added = pack_bf16(low_bf16(word[j]) + sum[2 * j], high_bf16(word[j]) + sum[2 * j + 1]);
    if (row < e.rows && column < e.columns) dx[(row * e.columns + column) / 2] = added;
  }
}

template <class L>
__device__ void copy_tiles(const CUtensorMap* a, const CUtensorMap* b, const Extent& e, uint32_t stages,
                           const Barriers& barriers) {
  Ring<L::kStages> ring;
  for (int i = blockIdx.x; i < e.tiles_m * e.tiles_n * e.parts; i += gridDim.x) {
    const Tile t = tile_at(e, L::kColumns, i);
    for (int j = 0; j < t.num_stages; ++j) {
      mbarrier_wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
      copy_stage<L>(a, b, t, (t.first_stage + j) * kGateDepth, stages + ring.stage * L::kStageBytes,
                    barriers.full + 8 * ring.stage);
      ring.advance();
    }
  }
}

template <Gate kGate, class L>
__device__ void multiply_tiles(const Extent& e, void* out, uint32_t stages, const Barriers& barriers) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Ring<L::kStages> ring;
  for (int i = blockIdx.x; i < e.tiles_m * e.tiles_n * e.parts; i += gridDim.x) {
    const Tile t = tile_at(e, L::kColumns, i);
    const Place at{t.m + group * 64 + warp * 16 + lane / 4, t.n + lane % 4 * 2};
    float sum[L::kSums] = {};
    [[maybe_unused]] uint32_t word[L::kSums / 2];
    if constexpr (kGate == Gate::dx) load_dx<L::kSums>(static_cast<const uint32_t*>(out), e, at, word);
    for (int j = 0; j < t.num_stages; ++j) {
      mbarrier_wait(barriers.full + 8 * ring.stage, ring.parity);
      float product[L::kSums];
      float(&target)[L::kSums] = kGate == Gate::dx ? sum : product;
      wgmma_fence();
      multiply_stage<L>(target, stages + ring.stage * L::kStageBytes, group, kGate == Gate::dx);
      wgmma_commit();
      wgmma_wait<0>();
      hold_registers(target);
      if (lane == 0) mbarrier_arrive(barriers.empty + 8 * ring.stage);
      ring.advance();
      if constexpr (kGate != Gate::dx) {
#pragma unroll
        for (int n = 0; n < L::kSums; ++n) sum[n] += product[n];
      }
    }
    if constexpr (kGate == Gate::logits) {
      if (e.bias) add_bias(e, at, sum);
      write_logits(static_cast<float*>(out), e, at, sum);
    }
    if constexpr (kGate == Gate::dx) add_to_dx(static_cast<uint32_t*>(out), e, at, sum, word);
    if constexpr (kGate == Gate::dw) write_partial(static_cast<float*>(out) + t.part * e.rows * e.columns, e, at, sum);
  }
}

template <Gate kGate, int kColumns, int kTerms>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, Extent e, void* out) {
  using L = Layout<kGate, kColumns, kTerms>;
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t barrier_words[2 * L::kStages];
  const uint32_t stages = (smem_addr(shared) + 1023) / 1024 * 1024;
  const Barriers barriers{smem_addr(barrier_words), smem_addr(barrier_words + L::kStages)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      mbarrier_init(barriers.full + 8 * i, 1);
      mbarrier_init(barriers.empty + 8 * i, kMultipliers / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kMultipliers) {
    multiply_tiles<kGate, L>(e, out, stages, barriers);
  } else if (elect_one()) {
    copy_tiles<L>(&a, &b, e, stages, barriers);
  }
}

template <Gate kGate, int kColumns, int kTerms>
void launch(Stream& s, const GateOperand& a, const GateOperand& b, Extent e, void* out) {
  using L = Layout<kGate, kColumns, kTerms>;
  constexpr int kBytes = L::kStages * L::kStageBytes + 1024;
  e.tiles_m = static_cast<int>(div_ceil(e.rows, kGateRows));
  e.tiles_n = static_cast<int>(div_ceil(e.columns, kColumns));
  e.stages_per_part = static_cast<int>(div_ceil(div_ceil(e.depth, kGateDepth), e.parts));
  const CUtensorMap a_map = map_of(a, L::kMajorA == Major::k ? kGateRows : kGateDepth, L::kTermsA);
  const CUtensorMap b_map = map_of(b, L::kMajorB == Major::k ? kColumns : kGateDepth, L::kTermsB);
  const int blocks = std::min(e.tiles_m * e.tiles_n * e.parts, num_multiprocessors(s));
  const auto kernel = product_kernel<kGate, kColumns, kTerms>;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, cuda_stream(s)>>>(a_map, b_map, e, out);
  check_launch("router_logits");
}

// Chooses the columns of a tile by the number of experts.
template <Gate kGate, int kTerms>
void launch_by_experts(Stream& s, const GateOperand& a, const GateOperand& b, const Extent& e, void* out) {
  if (gate_columns(e.columns) == 64) return launch<kGate, 64, kTerms>(s, a, b, e, out);
  launch<kGate, 128, kTerms>(s, a, b, e, out);
}

}  // namespace

void router_logits_on_tensor_cores(Stream& s, const RouterLogitsFwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  const GateScratch scratch(a.scratch.data, a.x_TD, a.w_ED, false);
  const GateOperand x{a.x_TD.ptr<bf16>(), T, D};
  const Extent e{.rows = T, .columns = E, .depth = D, .bias = bias_of(a), .parts = 1};
  float* logits = a.logits_TE.ptr<float>();
  if (a.w_ED.dtype == DType::bf16)
    return launch_by_experts<Gate::logits, 1>(s, x, {a.w_ED.ptr<bf16>(), E, D}, e, logits);
  split_terms(s, scratch.w_3ED, a.w_ED.ptr<float>(), E, D, D, kNumTerms);
  launch_by_experts<Gate::logits, 3>(s, x, {scratch.w_3ED, E, D}, e, logits);
}

void router_grads_on_tensor_cores(Stream& s, const RouterLogitsBwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  const GateScratch scratch(a.scratch.data, a.x_TD, a.w_ED, true);
  const GateOperand x{a.x_TD.ptr<bf16>(), T, D}, dlogits{scratch.dlogits_3TE, T, scratch.e};
  split_terms(s, scratch.dlogits_3TE, a.dlogits_TE.ptr<float>(), T, E, scratch.e, kNumTerms);
  if (!a.dw_ED.empty()) {
    const Extent e{.rows = D, .columns = E, .depth = T, .parts = static_cast<int>(a.partial_PED.dim(0))};
    launch_by_experts<Gate::dw, 3>(s, x, dlogits, e, a.partial_PED.ptr<float>());
  }
  if (a.dx_TD.empty()) return;
  const bool split_w = a.w_ED.dtype == DType::f32;
  if (split_w) split_terms(s, scratch.w_3ED, a.w_ED.ptr<float>(), E, D, D, 2);
  const GateOperand w{split_w ? scratch.w_3ED : a.w_ED.ptr<bf16>(), E, D};
  if (E <= kMaxExpertsOfDx && is_aligned(a.dx_TD)) return add_router_dx(s, a.dx_TD, dlogits, w, split_w ? 2 : 1);
  const Extent e{.rows = T, .columns = D, .depth = E, .parts = 1};
  if (split_w) return launch<Gate::dx, 128, 2>(s, dlogits, w, e, a.dx_TD.data);
  launch<Gate::dx, 128, 1>(s, dlogits, w, e, a.dx_TD.data);
}

}  // namespace moebius::cuda
