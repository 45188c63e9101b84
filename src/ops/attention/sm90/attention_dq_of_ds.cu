// dq = scale ds k, from tiles of ds in scratch
//
// Reading them bounds this kernel: two blocks share a multiprocessor. One of width 192 has it alone,
// and twice the queries for each tile of keys. One of width 256 has it alone too.
#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {
namespace {

// A block is 128 or 256 queries of one head of one sequence, 2 or 4 tiles of ds across. Two warpgroups
// multiply. One more warp loads: of width 192 and 256 a third warpgroup, which gives its registers to them.
template <int kWidth_>
struct DqTile {
  static constexpr int kWidth = kWidth_, kTiles = dq_tiles_of_block(kWidth), kTilesOfGroup = kTiles / 2;
  static constexpr int kStages = kWidth == 128 ? 3 : 4,
                       kBlocks = kTiles == 2 && kWidth < 256 ? 2 : 1;  // of a multiprocessor
  static constexpr int kConsumers = 2 * kGroupThreads, kThreads = kConsumers + (kBlocks == 2 ? 32 : kGroupThreads);
  using Keys = Sm90Tile<kDsEdge, kWidth>;
  struct Shared {
    unsigned char k[kStages][Keys::kBytes], ds[kStages][kTiles][kDsTileBytes];
    uint64_t full[kStages], empty[kStages];
  };
};

// Key tiles [first, last] that some queries of a tile see; none: last < first.
struct KeyTiles {
  int first, last;
  __device__ __forceinline__ bool has(int key_tile) const { return first <= key_tile && key_tile <= last; }
};
__device__ __forceinline__ KeyTiles seen_tiles(const AttentionSizes& z, const DsTiles& ds, int b, int query_tile) {
  const int64_t row = int64_t{query_tile} * kDsEdge;
  if (row >= z.rows || query_tile >= ds.query_end) return {0, -1};
  return {static_cast<int>(first_key(z, b, row) / kDsEdge), query_tile};
}

// A block's query tiles of a head, its share of their keys, and the place of the share.
struct DqWork {
  int b, h, query_tile, begin, end, part;
};

template <class Tile>
__device__ __forceinline__ DqWork work_of_block(const AttentionSizes& z, const DsTiles& ds) {
  const int heads = ds.kv_heads * ds.group;
  DqWork w{
      .b = ds.b + static_cast<int>(blockIdx.y),
      .h = ds.kv_head * ds.group + static_cast<int>(blockIdx.x) % heads,
      .query_tile = ds.query_begin + static_cast<int>(gridDim.z - 1 - blockIdx.z) * Tile::kTiles,  // the longest first
      .part = static_cast<int>(blockIdx.x) / heads};
  // The first tile sees the earliest key, and the last one that sees any key sees the latest.
  const int first = seen_tiles(z, ds, w.b, w.query_tile).first;
  int end = first;
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i) end = max(end, seen_tiles(z, ds, w.b, w.query_tile + i).last + 1);
  const int64_t tiles = end - first;
  w.begin = first + static_cast<int>(tiles * w.part / ds.parts);
  w.end = first + static_cast<int>(tiles * (w.part + 1) / ds.parts);
  return w;
}

template <class Tile>
__device__ void produce(typename Tile::Shared& shared, const CUtensorMap* keys, const AttentionSizes& z,
                        const DsTiles& ds, const DqWork& w) {
  KeyTiles seen[Tile::kTiles];
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i) seen[i] = seen_tiles(z, ds, w.b, w.query_tile + i);
  Ring<Tile::kStages> ring;
  for (int key_tile = w.begin; key_tile < w.end; ++key_tile, ring.advance()) {
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    int tiles = 0;
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i) tiles += seen[i].has(key_tile);
    mbarrier_arrive_expect(full, Tile::Keys::kBytes + tiles * static_cast<int>(kDsTileBytes));
    Tile::Keys::load(smem_addr(shared.k[ring.stage]), keys, full, w.h / ds.group, int64_t{key_tile} * kDsEdge, w.b);
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i) {
      if (seen[i].has(key_tile))
        bulk_load(smem_addr(shared.ds[ring.stage][i]), ds.tile(w.b, w.h, w.query_tile + i, key_tile),
                  static_cast<uint32_t>(kDsTileBytes), full);
    }
  }
}

// Stores 64 rows of f32 from `row` of the slice below `end`.
template <int kWidth>
__device__ __forceinline__ void store_part(const DsTiles& ds, const float (&sums)[kWidth / 2], const DqWork& w,
                                           int64_t row, int64_t end) {
  const Fragment at = fragment();
  const int64_t heads = int64_t{ds.kv_heads} * ds.group, rows = int64_t{ds.query_end - ds.query_begin} * kDsEdge;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = row + at.row + 8 * i;
    if (r >= end) continue;
    float* const to = ds.q_parts + ((w.part * rows + r) * heads + w.h - ds.kv_head * ds.group) * kWidth + at.col;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j)
      *reinterpret_cast<float2*>(to + 8 * j) = {sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]};
  }
}

template <class Tile>
__device__ void consume(typename Tile::Shared& shared, __nv_bfloat16* dq_out, const AttentionSizes& z,
                        const DsTiles& ds, const DqWork& w) {
  constexpr int kNum = Tile::kTilesOfGroup;
  const int first_tile = threadIdx.x / kGroupThreads * kNum;
  KeyTiles seen[kNum];
#pragma unroll
  for (int i = 0; i < kNum; ++i) seen[i] = seen_tiles(z, ds, w.b, w.query_tile + first_tile + i);
  float dq[kNum][Tile::kWidth / 2] = {};
  Ring<Tile::kStages> ring;
  for (int key_tile = w.begin; key_tile < w.end; ++key_tile, ring.advance()) {
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    const uint32_t k = smem_addr(shared.k[ring.stage]);
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      if (!seen[i].has(key_tile)) continue;
      const uint64_t left = wgmma_operand<Major::mn>(smem_addr(shared.ds[ring.stage][first_tile + i]));
      hold_registers(dq[i]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kDsEdge / 16; ++step)
        Wgmma<Major::mn, Major::mn>::multiply(dq[i], left + step * (2048 >> 4), Tile::Keys::along(k, step), true);
      wgmma_commit();
      wgmma_wait<0>();
      hold_registers(dq[i]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.empty[ring.stage]));
  }
  const int64_t end = min(z.rows, int64_t{ds.query_end} * kDsEdge), first = int64_t{ds.query_begin} * kDsEdge;
  const float scale[2] = {z.scale, z.scale};
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    const int64_t row = int64_t{w.query_tile + first_tile + i} * kDsEdge;
    if (ds.parts > 1)
      store_part<Tile::kWidth>(ds, dq[i], w, row - first, end - first);
    else
      store_sums<Tile::kWidth>(dq_out, dq[i], scale, w.b * z.rows + row, w.b * z.rows + end, z.heads, w.h);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    dq_of_ds_kernel(const __grid_constant__ CUtensorMap keys, __nv_bfloat16* dq, DsTiles ds, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(smem_addr(&shared.full[i]), 1);
      mbarrier_init(smem_addr(&shared.empty[i]), Tile::kConsumers / 32);
    }
    fence_mbarrier_init();
  }
  const DqWork w = work_of_block<Tile>(z, ds);
  __syncthreads();
  if (threadIdx.x < Tile::kConsumers) {
    if constexpr (Tile::kBlocks == 1) more_registers<kConsumerRegisters>();
    consume<Tile>(shared, dq, z, ds, w);
  } else {
    if constexpr (Tile::kBlocks == 1) fewer_registers<kProducerRegisters>();
    if (threadIdx.x == Tile::kConsumers) produce<Tile>(shared, &keys, z, ds, w);
  }
}

// dq = scale times the sum of the parts, in their order. A thread has two columns.
__global__ void __launch_bounds__(256) add_parts_kernel(__nv_bfloat16* dq, DsTiles ds, AttentionSizes z) {
  const int64_t heads = int64_t{ds.kv_heads} * ds.group, first = int64_t{ds.query_begin} * kDsEdge,
                rows = int64_t{ds.query_end - ds.query_begin} * kDsEdge, row = blockIdx.x, pairs = heads * z.width / 2;
  if (first + row >= z.rows) return;
  auto* const to = reinterpret_cast<uint32_t*>(
      dq + ((int64_t{ds.b} * z.rows + first + row) * z.heads + ds.kv_head * ds.group) * z.width);
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    float2 sum{0, 0};
    for (int part = 0; part < ds.parts; ++part) {
      const float2 x = reinterpret_cast<const float2*>(ds.q_parts)[(part * rows + row) * pairs + i];
      sum.x += x.x, sum.y += x.y;
    }
    to[i] = pack_bf16(sum.x * z.scale, sum.y * z.scale);
  }
}

template <int kWidth>
void launch(Stream& s, const AttentionBwd& a, const DsTiles& ds) {
  using Tile = DqTile<kWidth>;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const AttentionSizes z = attention_sizes(a);
  auto* const dq = static_cast<__nv_bfloat16*>(a.dq_THd.data);
  MOEBIUS_CUDA(cudaFuncSetAttribute(dq_of_ds_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int64_t tiles = ds.query_end - ds.query_begin;
  const dim3 blocks(ds.kv_heads * ds.group * ds.parts, ds.sequences,
                    static_cast<unsigned>(div_ceil(tiles, int64_t{Tile::kTiles})));
  dq_of_ds_kernel<Tile>
      <<<blocks, Tile::kThreads, kBytes, cuda_stream(s)>>>(rows_map(a.k_TGd, a.batch, kDsEdge), dq, ds, z);
  if (ds.parts > 1) add_parts_kernel<<<static_cast<unsigned>(tiles * kDsEdge), 256, 0, cuda_stream(s)>>>(dq, ds, z);
  check_launch("attention_bwd");
}

}  // namespace

void sm90_dq_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds) {
  if (a.q_THd.dim(2) == 64)
    launch<64>(s, a, ds);
  else if (a.q_THd.dim(2) == 128)
    launch<128>(s, a, ds);
  else if (a.q_THd.dim(2) == 256)
    launch<256>(s, a, ds);
  else
    launch<192>(s, a, ds);
}

}  // namespace moebius::cuda
