// dk = scale ds^T q of bf16 on sm_90a, for heads of 256, from tiles of ds in scratch
//
// A block is 128 keys of one kv head of one sequence, and walks the tiles that attention_dv_ds.cu has written for them.
#include "ops/attention/sm90/attention_dkv.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

constexpr int kWidth = 256, kStages = 4;
using Queries = Sm90Tile<kDsEdge, kWidth>;

struct Shared {
  unsigned char q[kStages][Queries::kBytes], ds[kStages][2][kDsTileBytes];  // of 64 keys each
  uint64_t full[kStages], empty[kStages];
  int rows_end;
};

__device__ void load_tiles(Shared& shared, const CUtensorMap* queries, const DsTiles& ds, DkvWalk walk, int kv_head,
                           int key, int b) {
  Ring<kStages> ring;
  for (int step = 0; step < walk.steps; ++step, ring.advance(), walk.next()) {
    const int h = kv_head * ds.group + walk.head, query_tile = walk.row / static_cast<int>(kDsEdge),
              key_tile = key / static_cast<int>(kDsEdge);
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    const bool has[2] = {ds.has(query_tile, key_tile), ds.has(query_tile, key_tile + 1)};
    mbarrier_arrive_expect(full, Queries::kBytes + (has[0] + has[1]) * static_cast<int>(kDsTileBytes));
    Queries::load(smem_addr(shared.q[ring.stage]), queries, full, h, walk.row, b);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (has[i])
        bulk_load(smem_addr(shared.ds[ring.stage][i]), ds.tile(b, h, query_tile, key_tile + i),
                  static_cast<uint32_t>(kDsTileBytes), full);
    }
  }
}

__device__ void multiply_tiles(Shared& shared, T* dk_out, const AttentionSizes& z, DkvWalk walk, const DsTiles& ds,
                               int kv_head, int key, int b) {
  const int group = threadIdx.x / kGroupThreads - 1, key_tile = key / static_cast<int>(kDsEdge) + group;
  float dk[kWidth / 2] = {};
  Ring<kStages> ring;
  for (int step = 0; step < walk.steps; ++step, ring.advance(), walk.next()) {
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    if (ds.has(walk.row / static_cast<int>(kDsEdge), key_tile)) {
      const Operand<Major::k> left(smem_addr(shared.ds[ring.stage][group]));
      const Operand<Major::mn> right(smem_addr(shared.q[ring.stage]), Queries::kBlockBytes);
      hold_registers(dk);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDsEdge / 16; ++k)
        Wgmma<Major::k, Major::mn>::multiply(dk, left.at(32 * k), right.at(2048 * k), true);
      wgmma_commit();
      wgmma_wait<0>();
      hold_registers(dk);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.empty[ring.stage]));
  }
  if (ds.kv_sums && walk.steps > 0) {
    const bool has_earlier = ds.query_begin * kDsEdge > key, has_later = ds.query_end * kDsEdge < z.rows;
    through_memory(dk, kv_sums_of(ds, kv_head, key, 2 * kWidth), has_earlier, has_later);
    if (has_later) return;
  }
  const float scale[2] = {z.scale, z.scale};
  store_sums<kWidth>(dk_out, dk, scale, b * z.kv_rows + int64_t{key_tile} * kDsEdge, (b + 1) * z.kv_rows, z.kv_heads,
                     kv_head);
}

__global__ void __launch_bounds__(kSm90Threads, 1)
    dk_of_ds_kernel(const __grid_constant__ CUtensorMap queries, T* dk, DsTiles ds, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  const DsBlock at = ds_block(ds);
  const DkvWalk walk = begin_walk(shared.rows_end, z, ds, at, [&] {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_addr(&shared.full[i]), 1);
      mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
    }
  });
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == 0) load_tiles(shared, &queries, ds, walk, at.kv_head, at.key, at.b);
  } else {
    more_registers<kConsumerRegisters>();
    multiply_tiles(shared, dk, z, walk, ds, at.kv_head, at.key, at.b);
  }
}

}  // namespace

void sm90_dk_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds) {
  const AttentionSizes z = attention_sizes(a);
  MOEBIUS_CUDA(cudaFuncSetAttribute(dk_of_ds_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Shared)}));
  dk_of_ds_kernel<<<dkv_blocks(z, ds), kSm90Threads, sizeof(Shared), cuda_stream(s)>>>(
      rows_map(a.q_THd, a.batch, kDsEdge), static_cast<T*>(a.dk_TGd.data), ds, z);
  check_launch("attention_bwd");
}

}  // namespace moebius::cuda
