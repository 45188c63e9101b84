// dk and dv of bf16 on sm_90a: a block is 128 keys of one kv head of one sequence, and walks the
// queries that see them, head by head of the group. Keys run along the rows of its scores.
#include "ops/attention/sm90/attention_dkv.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

// Sums of width 192 leave registers for 32 queries only. Where registers are left, they hold columns of
// a warpgroup's rows of k and v, in steps of 16: reading them from shared memory for each tile of
// queries takes as long as the products.
template <int kWidth_, int kValues_, bool kKeepsDs_>
struct DkvTile {
  static constexpr bool kKeepsDs = kKeepsDs_;
  static constexpr int kWidth = kWidth_, kValues = kValues_;
  static constexpr int kKeys = kDkvKeys, kQueries = kWidth == 192 ? 32 : 64,
                       kStages = kWidth == 64 ? 4 : 192 / kQueries;
  static constexpr int kHeldKeys = kWidth == 64 ? 4 : 0, kHeldValues = kWidth == 64 ? 4 : kWidth == 192 ? 2 : 0;
  using Keys = Sm90Tile<kKeys, kWidth>;
  using Values = Sm90Tile<kKeys, kValues>;
  using Queries = Sm90Tile<kQueries, kWidth>;
  using Outputs = Sm90Tile<kQueries, kValues>;
  using Columns = QueryColumns<kQueries>;  // of a stage
  struct Shared {
    unsigned char k[Keys::kBytes], v[Values::kBytes];
    unsigned char q[kStages][Queries::kBytes], dout[kStages][Outputs::kBytes];
    unsigned char ds[kKeepsDs ? kConsumerWarps : 1][kDsWarpBytes];  // on its way to memory
    Columns columns[kStages];
    uint64_t keys_full, full[kStages], empty[kStages];
    int rows_end;
  };
};

// The columns of a stage pass between producers and readers. To the readers: each producer lane writes and arrives at
// `full` (mbarrier.arrive releases in the block), and a reader's wait for that phase (try_wait
// acquires) sees all its arrivals: the writes come first. Back: the lanes of a reading warp read,
// __syncwarp orders that before the one arrival at `empty` that lane 0 makes for them, and the
// producer's wait orders the arrival before the next writes: order is transitive through the warp's
// barrier in the memory model of PTX. Tools that follow only the thread that arrives report a write
// after a read here. With an arrival of every lane they do not: that is 256 a step instead of 8.
template <class Tile>
__device__ void produce_queries(typename Tile::Shared& shared, const BwdMaps& maps, const RowSums& sums,
                                const AttentionSizes& z, DkvWalk walk, int kv_head, int key, int b) {
  const int lane = threadIdx.x % 32;
  if (walk.steps == 0) return;
  if (lane == 0) {
    const uint32_t full = smem_addr(&shared.keys_full);
    mbarrier_arrive_expect(full, Tile::Keys::kBytes + Tile::Values::kBytes);
    Tile::Keys::load(smem_addr(shared.k), &maps.k, full, kv_head, key, b);
    Tile::Values::load(smem_addr(shared.v), &maps.v, full, kv_head, key, b);
  }
  Ring<Tile::kStages> ring;
  for (int step = 0; step < walk.steps; ++step, ring.advance(), walk.next()) {
    const int h = kv_head * (z.heads / z.kv_heads) + walk.head;
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    if (lane == 0) {
      mbarrier_arrive_expect(full, Tile::Queries::kBytes + Tile::Outputs::kBytes);
      Tile::Queries::load(smem_addr(shared.q[ring.stage]), &maps.q, full, h, walk.row, b);
      Tile::Outputs::load(smem_addr(shared.dout[ring.stage]), &maps.dout, full, h, walk.row, b);
    }
    load_columns(shared.columns[ring.stage], sums, z, b, h, walk.row);
    mbarrier_arrive(full);
  }
}

template <class Tile>
__device__ void consume_queries(typename Tile::Shared& shared, T* dk_out, T* dv_out, const AttentionSizes& z,
                                DkvWalk walk, const DsTiles& ds, int kv_head, int key, int b) {
  using Keys = typename Tile::Keys;
  using Queries = typename Tile::Queries;
  using Outputs = typename Tile::Outputs;
  using Values = typename Tile::Values;
  constexpr int kWidth = Tile::kWidth, kValues = Tile::kValues, kScores = Tile::kQueries / 2;
  const int group_row = (threadIdx.x / kGroupThreads - 1) * 64;
  const int64_t base = b * z.kv_rows, first_key_row = base + key + group_row, end = base + z.kv_rows;
  if (walk.steps == 0) {
    store_zeros<kWidth>(dk_out, first_key_row, end, z.kv_heads, kv_head);
    return store_zeros<kValues>(dv_out, first_key_row, end, z.kv_heads, kv_head);
  }
  const float scale2 = z.scale * kLog2E;
  float dk[kWidth / 2] = {}, dv[kValues / 2] = {}, s[kScores], dp[kScores];
  uint32_t words[kScores / 2];  // of p, then of ds
  uint32_t k_words[Tile::kHeldKeys * 4 + 1], v_words[Tile::kHeldValues * 4 + 1];
  const auto start_scores = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    const uint32_t q = smem_addr(shared.q[ring.stage]), dout = smem_addr(shared.dout[ring.stage]);
    wgmma_fence();
    multiply_held<Keys, Queries, kWidth, Tile::kHeldKeys>(s, k_words, smem_addr(shared.k), group_row, q);
    multiply_held<Values, Outputs, kValues, Tile::kHeldValues>(dp, v_words, smem_addr(shared.v), group_row, dout);
  };
  const auto keep = [&] {
    if constexpr (Tile::kKeepsDs) {
      const int query_tile = walk.row / kDsEdge, key_tile = (key + group_row) / kDsEdge;
      if (!ds.has(query_tile, key_tile)) return;  // nothing is seen, and nothing will be read
      const int h = kv_head * ds.group + walk.head;
      keep_ds(ds.tile(b, h, query_tile, key_tile), shared.ds[threadIdx.x / 32 - 4], words,
              walk.row / Tile::kQueries % 2);
    }
  };
  Ring<Tile::kStages> ring;
  mbarrier_wait(smem_addr(&shared.keys_full), 0);
  load_words<Keys, Tile::kHeldKeys>(k_words, smem_addr(shared.k), group_row);
  load_words<Values, Tile::kHeldValues>(v_words, smem_addr(shared.v), group_row);
  start_scores(ring);
  for (int step = 0;; walk.next()) {
    const int stage = ring.stage;
    const typename Tile::Columns& columns = shared.columns[stage];
    wgmma_wait<1>();
    hold_registers(s);
    probabilities_of(s, columns, scale2, key + group_row + fragment().row, static_cast<int>(z.shift) + walk.row);
    pack(words, s);
    hold_words(words);
    wgmma_fence();
    add_product<Outputs, Tile::kQueries / 16>(dv, words, smem_addr(shared.dout[stage]));
    // Not <1>: with dv running while ds is made there are too few registers, and the compiler
    // serialises all products.
    wgmma_wait<0>();
    hold_registers(dp);
    hold_registers(dv);
    hold_words(words);
    dscores_of(dp, s, columns);
    pack(words, dp);
    hold_words(words);
    wgmma_fence();
    add_product<Queries, Tile::kQueries / 16>(dk, words, smem_addr(shared.q[stage]));
    if (++step == walk.steps) break;
    ring.advance();
    start_scores(ring);
    keep();
    wgmma_wait<2>();
    hold_registers(dk);
    hold_words(words);
    __syncwarp();  // one lane arrives for all that have read the columns
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.empty[stage]));
  }
  keep();
  wgmma_wait<0>();
  hold_registers(dv);
  hold_registers(dk);
  if constexpr (Tile::kKeepsDs) {
    if (ds.kv_sums) {
      float4* const at = kv_sums_of(ds, kv_head, key, kWidth + kValues);
      const bool has_earlier = ds.query_begin * kDsEdge > key, has_later = ds.query_end * kDsEdge < z.rows;
      through_memory(dk, at, has_earlier, has_later);
      through_memory(dv, at + kWidth / 8 * kGroupThreads, has_earlier, has_later);
      if (has_later) {
        tma_wait<0>();
        return;
      }
    }
  }
  const float scale[2] = {z.scale, z.scale}, one[2] = {1, 1};
  store_sums<kWidth>(dk_out, dk, scale, first_key_row, end, z.kv_heads, kv_head);
  store_sums<kValues>(dv_out, dv, one, first_key_row, end, z.kv_heads, kv_head);
  if constexpr (Tile::kKeepsDs) tma_wait<0>();  // shared memory ends with the block
}

template <class Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    dkv_kernel(const __grid_constant__ BwdMaps maps, T* dk, T* dv, RowSums sums, DsTiles ds, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  const int kv_head = ds.kv_head + blockIdx.x, b = ds.b + blockIdx.y;
  const int key = blockIdx.z * Tile::kKeys;  // the longest first
  // The first of the slice that sees a key.
  const int first_row = max(static_cast<int>(key - z.shift), ds.query_begin * static_cast<int>(kDsEdge));
  if (threadIdx.x < 32) {
    const int64_t rows_end = rows_end_of<Tile::kKeepsDs>(z, ds, b, first_row, key);
    if (threadIdx.x == 0) {
      shared.rows_end = static_cast<int>(rows_end);
      mbarrier_init(smem_addr(&shared.keys_full), 1);
      for (int i = 0; i < Tile::kStages; ++i) {
        mbarrier_init(smem_addr(&shared.full[i]), 33);
        mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
      }
      fence_mbarrier_init();
    }
  }
  __syncthreads();
  const int rows = shared.rows_end > first_row ? shared.rows_end - first_row : 0;
  const DkvWalk walk{.first_row = first_row,
                     .end_row = shared.rows_end,
                     .rows_of_step = Tile::kQueries,
                     .steps = (rows + Tile::kQueries - 1) / Tile::kQueries * (z.heads / z.kv_heads)};
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce_queries<Tile>(shared, maps, sums, z, walk, kv_head, key, b);
  } else {
    more_registers<kConsumerRegisters>();
    consume_queries<Tile>(shared, dk, dv, z, walk, ds, kv_head, key, b);
  }
}

template <class Tile>
void launch(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds) {
  const AttentionSizes z = attention_sizes(a);
  constexpr int kBytes = sizeof(typename Tile::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(dkv_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  dkv_kernel<Tile><<<dkv_blocks(z, ds), kSm90Threads, kBytes, cuda_stream(s)>>>(
      bwd_maps(a, Tile::kQueries, Tile::kKeys), static_cast<T*>(a.dk_TGd.data), static_cast<T*>(a.dv_TGd.data), sums,
      ds, z);
  check_launch("attention_bwd");
}

}  // namespace

void sm90_dkv(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds) {
  const int64_t width = a.q_THd.dim(2);
  if (width == 192)
    ds.tiles ? launch<DkvTile<192, 128, true>>(s, a, sums, ds) : launch<DkvTile<192, 128, false>>(s, a, sums, ds);
  else if (width == 64)
    ds.tiles ? launch<DkvTile<64, 64, true>>(s, a, sums, ds) : launch<DkvTile<64, 64, false>>(s, a, sums, ds);
  else
    ds.tiles ? launch<DkvTile<128, 128, true>>(s, a, sums, ds) : launch<DkvTile<128, 128, false>>(s, a, sums, ds);
}

}  // namespace moebius::cuda
