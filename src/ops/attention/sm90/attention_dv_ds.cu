// dv and ds of bf16 on sm_90a, for heads of 256: a block is 128 keys of one kv head of one sequence, and walks
// the queries that see them, head by head of the group. Keys run along the rows of its scores, 64 for each of
// two warpgroups.
//
// Keys and values take 128 KiB of shared memory, so q and do arrive in halves of 128 columns, in a ring of five
// places. The scores of the next queries are multiplied while the second half of their do arrives.
#include "ops/attention/sm90/attention_dkv.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

constexpr int kWidth = 256, kQueries = 64, kPlaces = 5;
using Keys = Sm90Tile<kDkvKeys, kWidth>;
using Half = Sm90Tile<kQueries, kWidth / 2>;  // of the columns of q or do
using Places = Ring<kPlaces>;

struct Shared {
  unsigned char k[Keys::kBytes], v[Keys::kBytes], rows[kPlaces][Half::kBytes];
  unsigned char ds[kConsumerWarps][kDsWarpBytes];  // on its way to memory
  QueryColumns<kQueries> columns[2];
  uint64_t keys_full, values_full, full[kPlaces], empty[kPlaces], columns_full[2], columns_empty[2];
  int rows_end;
};
static_assert(sizeof(Shared) <= 227 * 1024);

// Columns pass between warps as those of attention_dkv.cu do.
__device__ void load_rows(Shared& shared, const BwdMaps& maps, const RowSums& sums, const AttentionSizes& z,
                          DkvWalk walk, int kv_head, int key, int b) {
  const int lane = threadIdx.x % 32;
  Places ring;
  Ring<2> columns;
  const auto load_halves = [&](const CUtensorMap& map, int h) {
    for (int half = 0; half < 2; ++half, ring.advance()) {
      const uint32_t full = smem_addr(&shared.full[ring.stage]);
      mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (lane != 0) continue;
      mbarrier_arrive_expect(full, Half::kBytes);
      Half::load(smem_addr(shared.rows[ring.stage]), &map, full, 2 * h + half, walk.row, b);
    }
  };
  const auto load_keys = [&](unsigned char* to, const CUtensorMap& map, uint64_t& barrier) {
    if (lane != 0) return;
    mbarrier_arrive_expect(smem_addr(&barrier), Keys::kBytes);
    Keys::load(smem_addr(to), &map, smem_addr(&barrier), kv_head, key, b);
  };
  if (walk.steps == 0) return;
  load_keys(shared.k, maps.k, shared.keys_full);
  for (int step = 0; step < walk.steps; ++step, columns.advance(), walk.next()) {
    const int h = kv_head * (z.heads / z.kv_heads) + walk.head;
    load_halves(maps.q, h);
    if (step == 0) load_keys(shared.v, maps.v, shared.values_full);
    mbarrier_wait(smem_addr(&shared.columns_empty[columns.stage]), columns.parity ^ 1);
    load_columns(shared.columns[columns.stage], sums, z, b, h, walk.row);
    mbarrier_arrive(smem_addr(&shared.columns_full[columns.stage]));
    load_halves(maps.dout, h);
  }
}

// A kv head of 256 is two of 128 where its halves are stored.
__device__ __forceinline__ void store_half(T* dv, const float (&sums)[kWidth / 4], const AttentionSizes& z, int b,
                                           int row, int kv_head, int half) {
  const float one[2] = {1, 1};
  store_sums<kWidth / 2>(dv, sums, one, b * z.kv_rows + row, (b + 1) * z.kv_rows, 2 * z.kv_heads, 2 * kv_head + half);
}

__device__ void multiply_rows_of(Shared& shared, T* dv_out, const AttentionSizes& z, DkvWalk walk, const DsTiles& ds,
                                 int kv_head, int key, int b) {
  // The same in all lanes, which the compiler cannot know.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - 4, 0), group_row = warp / 4 * 64;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const auto release = [&](uint64_t& barrier) {
    if (is_first_lane) mbarrier_arrive(smem_addr(&barrier));
  };
  float dv_low[kWidth / 4] = {}, dv_high[kWidth / 4] = {};  // of the halves
  if (walk.steps == 0) {
    store_half(dv_out, dv_low, z, b, key + group_row, kv_head, 0);
    return store_half(dv_out, dv_high, z, b, key + group_row, kv_head, 1);
  }
  const float scale2 = z.scale * kLog2E;
  float s[kQueries / 2], dp[kQueries / 2];
  // sums [64 keys, 64 queries] = rows of k or v times the halves of q or do from a place on
  const auto start = [&](float(&sums)[kQueries / 2], uint32_t of_keys, Places place) {
    const Operand<Major::k> left(of_keys + group_row * 128);
#pragma unroll
    for (int half = 0; half < 2; ++half, place.advance()) {
      mbarrier_wait(smem_addr(&shared.full[place.stage]), place.parity);
      const Operand<Major::k> right(smem_addr(shared.rows[place.stage]));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kWidth / 32; ++step)
        Wgmma<Major::k, Major::k>::multiply(sums, left.at(bytes_across<Keys>(half * kWidth / 32 + step)),
                                            right.at(bytes_across<Half>(step)), half + step > 0);
    }
    wgmma_commit();
  };
  Places q, dout, dout_high;  // where those of the step begin, and the second half of do
  Ring<2> columns_ring;
  const auto follow_q = [&] {
    dout = q;
    dout.advance();
    dout.advance();
    dout_high = dout;
    dout_high.advance();
  };
  follow_q();
  mbarrier_wait(smem_addr(&shared.keys_full), 0);
  start(s, smem_addr(shared.k), q);
  mbarrier_wait(smem_addr(&shared.values_full), 0);
  start(dp, smem_addr(shared.v), dout);
  for (int step = 0;; walk.next(), columns_ring.advance()) {
    const QueryColumns<kQueries>& columns = shared.columns[columns_ring.stage];
    mbarrier_wait(smem_addr(&shared.columns_full[columns_ring.stage]), columns_ring.parity);
    wgmma_wait<1>();
    hold_registers(s);
    release(shared.empty[q.stage]);
    q.advance();
    release(shared.empty[q.stage]);
    uint32_t p_words[kQueries / 4], ds_words[kQueries / 4];
    probabilities_of(s, columns, scale2, key + group_row + fragment().row, static_cast<int>(z.shift) + walk.row);
    pack(p_words, s);
    wgmma_wait<0>();
    hold_registers(dp);
    dscores_of(dp, s, columns);
    pack(ds_words, dp);
    hold_words(p_words);
    wgmma_fence();
    add_product<Half, kQueries / 16>(dv_low, p_words, smem_addr(shared.rows[dout.stage]));
    add_product<Half, kQueries / 16>(dv_high, p_words, smem_addr(shared.rows[dout_high.stage]));
    const int query_tile = walk.row / static_cast<int>(kDsEdge),
              key_tile = (key + group_row) / static_cast<int>(kDsEdge);
    if (ds.has(query_tile, key_tile))  // or nothing is seen, and nothing will be read
      keep_ds(ds.tile(b, kv_head * ds.group + walk.head, query_tile, key_tile), shared.ds[warp], ds_words, 0);
    __syncwarp();
    release(shared.columns_empty[columns_ring.stage]);
    if (++step == walk.steps) break;
    q = dout_high;
    q.advance();
    start(s, smem_addr(shared.k), q);
    wgmma_wait<1>();  // dv
    hold_registers(dv_low);
    hold_registers(dv_high);
    hold_words(p_words);
    release(shared.empty[dout.stage]);
    release(shared.empty[dout_high.stage]);
    follow_q();
    start(dp, smem_addr(shared.v), dout);
  }
  wgmma_wait<0>();
  hold_registers(dv_low);
  hold_registers(dv_high);
  if (is_first_lane) tma_wait<0>();  // shared memory ends with the block
  if (ds.kv_sums) {
    float4* const at = kv_sums_of(ds, kv_head, key, 2 * kWidth) + kWidth / 8 * kGroupThreads;
    const bool has_earlier = ds.query_begin * kDsEdge > key, has_later = ds.query_end * kDsEdge < z.rows;
    through_memory(dv_low, at, has_earlier, has_later);
    through_memory(dv_high, at + kWidth / 16 * kGroupThreads, has_earlier, has_later);
    if (has_later) return;
  }
  store_half(dv_out, dv_low, z, b, key + group_row, kv_head, 0);
  store_half(dv_out, dv_high, z, b, key + group_row, kv_head, 1);
}

__global__ void __launch_bounds__(kSm90Threads, 1)
    dv_and_ds_kernel(const __grid_constant__ BwdMaps maps, T* dv, RowSums sums, DsTiles ds, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw);
  const DsBlock at = ds_block(ds);
  const DkvWalk walk = begin_walk(shared.rows_end, z, ds, at, [&] {
    for (uint64_t* barrier : {&shared.keys_full, &shared.values_full}) mbarrier_init(smem_addr(barrier), 1);
    for (int i = 0; i < kPlaces; ++i) {
      mbarrier_init(smem_addr(&shared.full[i]), 1);
      mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_addr(&shared.columns_full[i]), 32);
      mbarrier_init(smem_addr(&shared.columns_empty[i]), kConsumerWarps);
    }
  });
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x < 32) load_rows(shared, maps, sums, z, walk, at.kv_head, at.key, at.b);
  } else {
    more_registers<kConsumerRegisters>();
    multiply_rows_of(shared, dv, z, walk, ds, at.kv_head, at.key, at.b);
  }
}

}  // namespace

void sm90_dv_and_ds(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds) {
  const AttentionSizes z = attention_sizes(a);
  MOEBIUS_CUDA(
      cudaFuncSetAttribute(dv_and_ds_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Shared)}));
  dv_and_ds_kernel<<<dkv_blocks(z, ds), kSm90Threads, sizeof(Shared), cuda_stream(s)>>>(
      bwd_maps(a, kQueries, kDkvKeys), static_cast<T*>(a.dv_TGd.data), sums, ds, z);
  check_launch("attention_bwd");
}

}  // namespace moebius::cuda
