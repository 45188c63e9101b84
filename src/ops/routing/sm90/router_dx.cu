// dx[t, :] += sum over e of dlogits[t, e] w[e, :] on the tensor cores
//
// Operands are sums of two bf16 terms (w of one, when it is bf16). The product of the two second
// terms is left out: it is 2^-16 of the result, before rounding to bf16. The kernel is limited by
// reading and writing dx.
//
// A block keeps the dlogits of 128 tokens and loops over D in tiles. Its roles form a pipeline: one warp copies in
// (dlogits, then for each tile dx and, 64 experts at a time, w); two warpgroups multiply 64 tokens each and add to dx
// in shared memory; one warp copies dx out.
#include <algorithm>

#include "ops/routing/cuda/router_terms.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = kMultipliers + 64, kTermsA = 2, kTileBuffers = 2;
constexpr int kSharedBytes = 224 * 1024;
constexpr int kTermBytesA = kGateRows * 128, kBlockBytesA = kTermsA * kTermBytesA;

// kNumBlocks: of 64 experts.
template <int kNumBlocks, int kNumTerms>
struct Layout {
  static constexpr int kBlocks = kNumBlocks, kTerms = kNumTerms, kColumns = kBlocks <= 2 ? 128 : 64;
  static constexpr int kBytesA = kBlocks * kBlockBytesA, kTileBytes = kGateRows * kColumns * 2;
  static constexpr int kStageBytes = kTerms * kColumns * 128;
  static constexpr int kStages = (kSharedBytes - kBytesA - kTileBuffers * kTileBytes) / kStageBytes;
  static constexpr int kSums = kColumns / 2;  // of a thread
};

struct Maps {
  CUtensorMap dlogits, w, dx;
};

struct Work {
  int row_tiles, column_tiles, tiles_per_item, items_per_row;
};

// The layout of shared memory. Each barrier of a buffer or stage is 8 bytes after the one before.
struct Shared {
  uint32_t a, tiles, stages;
  uint32_t a_full, a_empty, tile_full, tile_done, tile_empty, stage_full, stage_empty;
};

// fn(first row, first tile, end of tiles) for the items of this block; an item without tiles is none.
template <class F>
__device__ void for_each_item(const Work& work, F&& fn) {
  for (int i = blockIdx.x; i < work.row_tiles * work.items_per_row; i += gridDim.x) {
    const int first = i % work.items_per_row * work.tiles_per_item;
    const int end = min(first + work.tiles_per_item, work.column_tiles);
    if (first < end) fn(i / work.items_per_row * kGateRows, first, end);
  }
}

template <class L>
__device__ void copy_in(const Maps& maps, const Work& work, const Shared& shared) {
  Ring<1> a;
  Ring<kTileBuffers> tile;
  Ring<L::kStages> stage;
  for_each_item(work, [&](int row, int begin, int end) {
    mbarrier_wait(shared.a_empty, a.parity ^ 1);
    mbarrier_arrive_expect(shared.a_full, L::kBytesA);
    for (int b = 0; b < L::kBlocks; ++b)
      tma_load(shared.a + b * kBlockBytesA, &maps.dlogits, shared.a_full, b * kGateDepth, row, 0);
    a.advance();
    for (int n = begin; n < end; ++n) {
      const uint32_t tile_full = shared.tile_full + 8 * tile.stage, to = shared.tiles + tile.stage * L::kTileBytes;
      mbarrier_wait(shared.tile_empty + 8 * tile.stage, tile.parity ^ 1);
      mbarrier_arrive_expect(tile_full, L::kTileBytes);
      for (int j = 0; j < L::kColumns / 64; ++j)
        tma_load(to + j * kGateRows * 128, &maps.dx, tile_full, n * L::kColumns + j * 64, row);
      tile.advance();
      for (int b = 0; b < L::kBlocks; ++b) {
        const uint32_t full = shared.stage_full + 8 * stage.stage, to_b = shared.stages + stage.stage * L::kStageBytes;
        mbarrier_wait(shared.stage_empty + 8 * stage.stage, stage.parity ^ 1);
        mbarrier_arrive_expect(full, L::kStageBytes);
        for (int j = 0; j < L::kColumns / 64; ++j)
          tma_load(to_b + j * L::kTerms * kBoxBytes, &maps.w, full, n * L::kColumns + j * 64, b * kGateDepth, 0);
        stage.advance();
      }
    }
  });
}

template <class L>
__device__ void copy_out(const Maps& maps, const Work& work, const Shared& shared) {
  Ring<kTileBuffers> tile;
  for_each_item(work, [&](int row, int begin, int end) {
    for (int n = begin; n < end; ++n) {
      mbarrier_wait(shared.tile_done + 8 * tile.stage, tile.parity);
      for (int j = 0; j < L::kColumns / 64; ++j) {
        tma_store(&maps.dx, shared.tiles + tile.stage * L::kTileBytes + j * kGateRows * 128, n * L::kColumns + j * 64,
                  row);
      }
      tma_commit();
      tma_wait_read<0>();
      mbarrier_arrive(shared.tile_empty + 8 * tile.stage);
      tile.advance();
    }
  });
  tma_wait<0>();
}

// sum += the products of 64 experts, small terms first.
template <class L>
__device__ void multiply_block(float (&sum)[L::kSums], uint32_t a_address, uint32_t b_address, bool accumulate) {
  const uint64_t a = wgmma_operand<Major::k>(a_address);
  const uint64_t b = wgmma_operand<Major::mn>(b_address, L::kTerms * kBoxBytes);
#pragma unroll
  for (int p = kTermsA - 1; p >= 0; --p) {
#pragma unroll
    for (int q = L::kTerms - 1; q >= 0; --q) {
      if (p + q >= kTermsA) continue;
#pragma unroll
      for (int k = 0; k < kGateDepth / 16; ++k) {
        Wgmma<Major::k, Major::mn>::multiply(sum, a + ((p * kTermBytesA + k * 32) >> 4),
                                             b + ((q * kBoxBytes + k * 2048) >> 4), accumulate);
        accumulate = true;
      }
    }
  }
}

// The words of dx at the places of the thread's sums; first: its row of the first column.
template <class L>
__device__ void add_to_tile(uint8_t* first, int lane, const float (&sum)[L::kSums]) {
#pragma unroll
  for (int j = 0; j < L::kSums / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t offset = (j / 8) * kGateRows * 128 + swizzle_128(lane / 4 + 8 * i, j % 8) + lane % 4 * 4;
      auto* word = reinterpret_cast<uint32_t*>(first + offset);
      *word = pack_bf16(low_bf16(*word) + sum[4 * j + 2 * i], high_bf16(*word) + sum[4 * j + 2 * i + 1]);
    }
  }
}

template <class L>
__device__ void multiply(const Work& work, const Shared& shared, uint8_t* tiles) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Ring<1> a;
  Ring<kTileBuffers> tile;
  Ring<L::kStages> stage;
  for_each_item(work, [&](int, int begin, int end) {
    mbarrier_wait(shared.a_full, a.parity);
    a.advance();
    for (int n = begin; n < end; ++n) {
      float sum[L::kSums];
      for (int b = 0; b < L::kBlocks; ++b) {
        mbarrier_wait(shared.stage_full + 8 * stage.stage, stage.parity);
        wgmma_fence();
        multiply_block<L>(sum, shared.a + b * kBlockBytesA + group * kBoxBytes,
                          shared.stages + stage.stage * L::kStageBytes, b > 0);
        wgmma_commit();
        wgmma_wait<0>();
        hold_registers(sum);
        if (lane == 0) mbarrier_arrive(shared.stage_empty + 8 * stage.stage);
        stage.advance();
      }
      if (lane == 0 && n == end - 1) mbarrier_arrive(shared.a_empty);
      mbarrier_wait(shared.tile_full + 8 * tile.stage, tile.parity);
      add_to_tile<L>(tiles + tile.stage * L::kTileBytes + (group * 64 + warp * 16) * 128, lane, sum);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.tile_done + 8 * tile.stage);
      tile.advance();
    }
  });
}

template <int kBlocks, int kTerms>
__global__ void __launch_bounds__(kThreads, 1) router_dx_kernel(const __grid_constant__ Maps maps, Work work) {
  using L = Layout<kBlocks, kTerms>;
  constexpr int kWarps = kMultipliers / 32;
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t barriers[2 + 3 * kTileBuffers + 2 * L::kStages];
  uint8_t* base = memory + (1024 - smem_addr(memory) % 1024) % 1024;
  Shared shared{.a = smem_addr(base)};
  shared.tiles = shared.a + L::kBytesA;
  shared.stages = shared.tiles + kTileBuffers * L::kTileBytes;
  uint32_t next = smem_addr(barriers);
  const auto place = [&](uint32_t& first, int count, uint32_t arrivals) {
    first = next;
    for (int i = 0; i < count && threadIdx.x == 0; ++i) mbarrier_init(next + 8 * i, arrivals);
    next += 8 * count;
  };
  place(shared.a_full, 1, 1);
  place(shared.a_empty, 1, kWarps);
  place(shared.tile_full, kTileBuffers, 1);
  place(shared.tile_done, kTileBuffers, kWarps);
  place(shared.tile_empty, kTileBuffers, 1);
  place(shared.stage_full, L::kStages, 1);
  place(shared.stage_empty, L::kStages, kWarps);
  if (threadIdx.x == 0) fence_mbarrier_init();
  __syncthreads();
  if (threadIdx.x < kMultipliers) {
    multiply<L>(work, shared, base + L::kBytesA);
  } else if (threadIdx.x < kMultipliers + 32) {
    if (elect_one()) copy_in<L>(maps, work, shared);
  } else if (elect_one()) {
    copy_out<L>(maps, work, shared);
  }
}

template <int kBlocks, int kTerms>
void launch(Stream& s, const Tensor& dx_TD, const GateOperand& dlogits, const GateOperand& w) {
  using L = Layout<kBlocks, kTerms>;
  const int64_t T = dx_TD.dim(0), D = dx_TD.dim(1);
  const int multiprocessors = num_multiprocessors(s);
  Maps maps{.dlogits = map_of(dlogits, kGateRows, kTermsA), .w = map_of(w, kGateDepth, kTerms)};
  maps.dx = make_tensor_map<2>(dx_TD.data, {BoxDim{D, 1, 64}, BoxDim{T, D, kGateRows}});
  Work work{.row_tiles = static_cast<int>(div_ceil(T, kGateRows)),
            .column_tiles = static_cast<int>(div_ceil(D, L::kColumns))};
  // With fewer than two items per multiprocessor, the tiles of a row are divided among several items.
  work.items_per_row =
      static_cast<int>(std::clamp<int64_t>(div_ceil(2 * multiprocessors, work.row_tiles) - 1, 1, work.column_tiles));
  work.tiles_per_item = static_cast<int>(div_ceil(work.column_tiles, work.items_per_row));
  const int blocks = std::min(work.row_tiles * work.items_per_row, multiprocessors);
  const auto kernel = router_dx_kernel<kBlocks, kTerms>;
  constexpr int kBytes = kSharedBytes + 1024;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBytes, cuda_stream(s)>>>(maps, work);
  check_launch("router_logits_bwd");
}

template <int kTerms>
void launch_by_experts(Stream& s, const Tensor& dx_TD, const GateOperand& dlogits, const GateOperand& w) {
  if (w.rows <= 64) return launch<1, kTerms>(s, dx_TD, dlogits, w);
  if (w.rows <= 128) return launch<2, kTerms>(s, dx_TD, dlogits, w);
  launch<4, kTerms>(s, dx_TD, dlogits, w);
}

}  // namespace

void add_router_dx(Stream& s, const Tensor& dx_TD, const GateOperand& dlogits, const GateOperand& w, int terms_of_w) {
  if (terms_of_w == 1) return launch_by_experts<1>(s, dx_TD, dlogits, w);
  launch_by_experts<2>(s, dx_TD, dlogits, w);
}

}  // namespace moebius::cuda
