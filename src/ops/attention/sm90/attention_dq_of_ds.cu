// dq = scale ds k from tiles of ds in scratch. Reading them bounds this kernel; two blocks share a multiprocessor.
#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {
namespace {

constexpr int kConsumers = 2 * kGroupThreads, kThreads = kConsumers + 32;  // the last warp loads

// A block is 128 queries of one head of one sequence, two tiles of ds across.
template <int kWidth_>
struct DqTile {
  static constexpr int kWidth = kWidth_, kStages = kWidth == 64 ? 4 : 3;
  using Keys = Sm90Tile<kDsEdge, kWidth>;
  struct Shared {
    unsigned char k[kStages][Keys::kBytes], ds[kStages][2][kDsTileBytes];
    uint64_t full[kStages], empty[kStages];
  };
};

// Query tiles of a block, and the key tiles [first, last] of each that some of its queries see;
// none: last < first.
struct DqWork {
  int b, h, query_tile, first[2], last[2];
  __device__ __forceinline__ bool has(int group, int key_tile) const {
    const int from = group == 0 ? first[0] : first[1], to = group == 0 ? last[0] : last[1];
    return from <= key_tile && key_tile <= to;
  }
  // Both tiles together: the first sees the earliest key, and who comes last sees the latest.
  __device__ __forceinline__ int begin() const { return first[0]; }
  __device__ __forceinline__ int end() const { return max(last[0], last[1]) + 1; }
};

__device__ __forceinline__ DqWork work_of_block(const AttentionSizes& z, const DsTiles& ds) {
  DqWork w{.b = ds.b + static_cast<int>(blockIdx.y),
           .h = ds.kv_head * ds.group + static_cast<int>(blockIdx.x),
           .query_tile = static_cast<int>(gridDim.z - 1 - blockIdx.z) * 2};  // the longest first
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = int64_t{w.query_tile + i} * kDsEdge;
    w.first[i] = row < z.rows ? static_cast<int>(first_key(z, w.b, row) / kDsEdge) : 0;
    w.last[i] = row < z.rows ? w.query_tile + i : -1;
  }
  return w;
}

template <class Tile>
__device__ void produce(typename Tile::Shared& shared, const CUtensorMap* keys, const DsTiles& ds, const DqWork& w) {
  Ring<Tile::kStages> ring;
  for (int key_tile = w.begin(); key_tile < w.end(); ++key_tile, ring.advance()) {
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    const int tiles = w.has(0, key_tile) + w.has(1, key_tile);
    mbarrier_arrive_expect(full, Tile::Keys::kBytes + tiles * kDsTileBytes);
    Tile::Keys::load(smem_addr(shared.k[ring.stage]), keys, full, w.h / ds.group, int64_t{key_tile} * kDsEdge, w.b);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (w.has(i, key_tile))
        bulk_load(smem_addr(shared.ds[ring.stage][i]), ds.tile(w.b, w.h, w.query_tile + i, key_tile), kDsTileBytes,
                  full);
    }
  }
}

template <class Tile>
__device__ void consume(typename Tile::Shared& shared, __nv_bfloat16* dq_out, const AttentionSizes& z,
                        const DqWork& w) {
  const int group = threadIdx.x / kGroupThreads;
  float dq[Tile::kWidth / 2] = {};
  Ring<Tile::kStages> ring;
  for (int key_tile = w.begin(); key_tile < w.end(); ++key_tile, ring.advance()) {
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    if (w.has(group, key_tile)) {
      const uint32_t k = smem_addr(shared.k[ring.stage]);
      const uint64_t ds = wgmma_operand<Major::mn>(smem_addr(shared.ds[ring.stage][group]));
      hold_registers(dq);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDsEdge / 16; ++step)
        Wgmma<Major::mn, Major::mn>::multiply(dq, ds + step * (2048 >> 4), Tile::Keys::along(k, step), true);
      wgmma_commit();
      wgmma_wait<0>();
      hold_registers(dq);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.empty[ring.stage]));
  }
  const int64_t base = w.b * z.rows, row = base + int64_t{w.query_tile + group} * kDsEdge;
  const float scale[2] = {z.scale, z.scale};
  store_sums<Tile::kWidth>(dq_out, dq, scale, row, base + z.rows, z.heads, w.h);
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    dq_of_ds_kernel(const __grid_constant__ CUtensorMap keys, __nv_bfloat16* dq, DsTiles ds, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(smem_addr(&shared.full[i]), 1);
      mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  const DqWork w = work_of_block(z, ds);
  __syncthreads();
  if (threadIdx.x < kConsumers)
    consume<Tile>(shared, dq, z, w);
  else if (threadIdx.x == kConsumers)
    produce<Tile>(shared, &keys, ds, w);
}

template <int kWidth>
void launch(Stream& s, const AttentionBwd& a, const DsTiles& ds) {
  using Tile = DqTile<kWidth>;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const AttentionSizes z = attention_sizes(a);
  MOEBIUS_CUDA(cudaFuncSetAttribute(dq_of_ds_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 blocks(ds.kv_heads * ds.group, ds.sequences, static_cast<unsigned>(div_ceil(z.rows, 2 * kDsEdge)));
  dq_of_ds_kernel<Tile><<<blocks, kThreads, kBytes, cuda_stream(s)>>>(
      rows_map(a.k_TGd, a.batch, kDsEdge), static_cast<__nv_bfloat16*>(a.dq_THd.data), ds, z);
  check_launch("attention_bwd");
}

}  // namespace

void sm90_dq_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds) {
  if (a.q_THd.dim(2) == 64)
    launch<64>(s, a, ds);
  else
    launch<128>(s, a, ds);
}

}  // namespace moebius::cuda
