// dq of bf16 on sm_90a from recomputed scores: a block is 128 queries of one head
// of one sequence, and walks the keys that they see. Queries run along the rows of its scores.
#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

// Where sums of width 192 leave no registers for them, rows of do are read from shared
// memory each time.
template <int kWidth_, int kValues_>
struct DqTile {
  static constexpr int kWidth = kWidth_, kValues = kValues_;
  static constexpr int kQueries = 128, kKeys = 64, kStages = kWidth == 64 ? 6 : kWidth == 128 ? 4 : 3;
  static constexpr bool kHoldsOutputs = kWidth < 192;
  using Queries = Sm90Tile<kQueries, kWidth>;
  using Outputs = Sm90Tile<kQueries, kValues>;
  using Keys = Sm90Tile<kKeys, kWidth>;
  using Values = Sm90Tile<kKeys, kValues>;
  struct Shared {
    unsigned char q[Queries::kBytes], dout[Outputs::kBytes];
    unsigned char k[kStages][Keys::kBytes], v[kStages][Values::kBytes];
    uint64_t queries_full, full[kStages], empty[kStages];
  };
};

// A block's work: queries from row `row` of head h, keys in `steps` tiles from `key`.
struct DqWork {
  int h, kv_head, row, key, steps, b;
};

template <class Tile>
__device__ void produce_keys(typename Tile::Shared& shared, const BwdMaps& maps, const DqWork& w) {
  if (w.steps == 0) return;
  const uint32_t queries_full = smem_addr(&shared.queries_full);
  mbarrier_arrive_expect(queries_full, Tile::Queries::kBytes + Tile::Outputs::kBytes);
  Tile::Queries::load(smem_addr(shared.q), &maps.q, queries_full, w.h, w.row, w.b);
  Tile::Outputs::load(smem_addr(shared.dout), &maps.dout, queries_full, w.h, w.row, w.b);
  Ring<Tile::kStages> ring;
  for (int step = 0; step < w.steps; ++step, ring.advance()) {
    const int key = w.key + step * Tile::kKeys;
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    mbarrier_arrive_expect(full, Tile::Keys::kBytes + Tile::Values::kBytes);
    Tile::Keys::load(smem_addr(shared.k[ring.stage]), &maps.k, full, w.kv_head, key, w.b);
    Tile::Values::load(smem_addr(shared.v[ring.stage]), &maps.v, full, w.kv_head, key, w.b);
  }
}

// The values that a thread keeps of its two rows.
struct MyRows {
  float lse2[2], delta[2];
  int first[2], last[2];  // seen keys; none past the sequence
};

__device__ inline MyRows my_rows(const RowSums& sums, const AttentionSizes& z, int h, int64_t row, int64_t b) {
  MyRows mine;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = row + fragment().row + 8 * i;
    const bool exists = r < z.rows;
    const int64_t at = (b * z.heads + h) * z.rows + r;
    mine.lse2[i] = exists ? sums.lse2[at] : 0.0f;
    mine.delta[i] = exists ? sums.delta[at] : 0.0f;
    mine.first[i] = exists ? static_cast<int>(first_key(z, b, r)) : 0;
    mine.last[i] = exists ? static_cast<int>(last_key(z, r)) : -1;
  }
  return mine;
}

// From scores [queries, keys] of a stage: probabilities in place, 0 where unseen.
__device__ __forceinline__ void probabilities_of(float (&s)[32], const MyRows& mine, float scale2, int key,
                                                 bool whole) {
#pragma unroll
  for (int e = 0; e < 32; ++e) s[e] = exp2_approx(s[e] * scale2 - mine.lse2[e / 2 % 2]);
  if (whole) return;
  const int col = fragment().col;
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    const int i = e / 2 % 2, at = key + e / 4 * 8 + col + e % 2;
    if (at < mine.first[i] || at > mine.last[i]) s[e] = 0;
  }
}

template <class Tile>
__device__ void consume_keys(typename Tile::Shared& shared, T* dq_out, const RowSums& sums, const AttentionSizes& z,
                             const DqWork& w) {
  using Keys = typename Tile::Keys;
  using Values = typename Tile::Values;
  using Queries = typename Tile::Queries;
  using Outputs = typename Tile::Outputs;
  constexpr int kWidth = Tile::kWidth, kValues = Tile::kValues;
  const int group_row = (threadIdx.x / kGroupThreads - 1) * 64, row = w.row + group_row;
  const int64_t base = w.b * z.rows;
  if (w.steps == 0) return store_zeros<kWidth>(dq_out, base + row, base + z.rows, z.heads, w.h);
  const MyRows mine = my_rows(sums, z, w.h, row, w.b);
  // All 64 rows see the keys in [last_first, first_last].
  const int first_last = static_cast<int>(last_key(z, row)),
            last_first = row + 63 < z.rows ? static_cast<int>(first_key(z, w.b, row + 63)) : 0x7fffffff;
  const float scale2 = z.scale * kLog2E;
  float dq[kWidth / 2] = {}, s[32], dp[32];
  uint32_t dout[Tile::kHoldsOutputs ? kValues / 4 : 1], ds_words[16] = {};
  const auto start_scores = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    wgmma_fence();
    multiply_rows<Queries, Keys, kWidth>(s, smem_addr(shared.q), group_row, smem_addr(shared.k[ring.stage]));
    const uint32_t v = smem_addr(shared.v[ring.stage]);
    if constexpr (Tile::kHoldsOutputs)
      multiply_words<Values, kValues>(dp, dout, v);
    else
      multiply_rows<Outputs, Values, kValues>(dp, smem_addr(shared.dout), group_row, v);
  };
  const auto start_sums = [&](int stage) {
    hold_words(ds_words);
    wgmma_fence();
    add_product<Keys, 4>(dq, ds_words, smem_addr(shared.k[stage]));
  };
  mbarrier_wait(smem_addr(&shared.queries_full), 0);
  if constexpr (Tile::kHoldsOutputs) load_words<Outputs, kValues / 16>(dout, smem_addr(shared.dout), group_row);
  Ring<Tile::kStages> ring;
  start_scores(ring);
  start_sums(0);  // of zeros, so that every step finds the same products running
  for (int step = 0;;) {
    const int stage = ring.stage, key = w.key + step * Tile::kKeys;
    // Running, oldest first: scores, dp, and the last step's dq.
    wgmma_wait<2>();
    hold_registers(s);
    probabilities_of(s, mine, scale2, key, key >= last_first && key + Tile::kKeys - 1 <= first_last);
    wgmma_wait<1>();
    hold_registers(dp);
#pragma unroll
    for (int e = 0; e < 32; ++e) dp[e] = s[e] * (dp[e] - mine.delta[e / 2 % 2]);
    wgmma_wait<0>();
    hold_registers(dq);
    hold_words(ds_words);
    if (step > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.empty[ring.last()]));
    pack(ds_words, dp);
    if (++step == w.steps) break;
    ring.advance();
    start_scores(ring);
    start_sums(stage);
  }
  start_sums(ring.stage);
  wgmma_wait<0>();
  hold_registers(dq);
  const float scale[2] = {z.scale, z.scale};
  store_sums<kWidth>(dq_out, dq, scale, base + row, base + z.rows, z.heads, w.h);
}

template <class Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    dq_kernel(const __grid_constant__ BwdMaps maps, T* dq, RowSums sums, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  DqWork w;
  w.h = blockIdx.x, w.kv_head = w.h / (z.heads / z.kv_heads), w.b = blockIdx.y;
  w.row = (gridDim.z - 1 - blockIdx.z) * Tile::kQueries;  // the longest first
  const int64_t rows_end = w.row + Tile::kQueries < z.rows ? w.row + Tile::kQueries : z.rows;
  const int end = static_cast<int>(last_key(z, rows_end - 1)) + 1;
  w.key = static_cast<int>(first_key(z, w.b, w.row)) / Tile::kKeys * Tile::kKeys;
  w.steps = end > w.key ? (end - w.key + Tile::kKeys - 1) / Tile::kKeys : 0;
  if (threadIdx.x == 0) {
    mbarrier_init(smem_addr(&shared.queries_full), 1);
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(smem_addr(&shared.full[i]), 1);
      mbarrier_init(smem_addr(&shared.empty[i]), kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce_keys<Tile>(shared, maps, w);
  } else {
    more_registers<kConsumerRegisters>();
    consume_keys<Tile>(shared, dq, sums, z, w);
  }
}

template <class Tile>
void launch(Stream& s, const AttentionBwd& a, const RowSums& sums) {
  const AttentionSizes z = attention_sizes(a);
  constexpr int kBytes = sizeof(typename Tile::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(dq_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 blocks(z.heads, static_cast<unsigned>(a.batch), static_cast<unsigned>(div_ceil(z.rows, Tile::kQueries)));
  dq_kernel<Tile><<<blocks, kSm90Threads, kBytes, cuda_stream(s)>>>(bwd_maps(a, Tile::kQueries, Tile::kKeys),
                                                                    static_cast<T*>(a.dq_THd.data), sums, z);
  check_launch("attention_bwd");
}

}  // namespace

void sm90_dq(Stream& s, const AttentionBwd& a, const RowSums& sums) {
  if (a.q_THd.dim(2) == 64)
    launch<DqTile<64, 64>>(s, a, sums);
  else if (a.q_THd.dim(2) == 128)
    launch<DqTile<128, 128>>(s, a, sums);
  else
    launch<DqTile<192, 128>>(s, a, sums);
}

}  // namespace moebius::cuda
