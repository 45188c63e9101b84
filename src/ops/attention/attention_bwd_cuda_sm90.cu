// The backward pass of bf16 on sm_90a, for heads of 64, 128, and 192 with values of 128. As the generic one it computes
// scores twice, so that every sum has one order without atomics: one kernel walks queries and sums dk and dv, one walks
// keys and sums dq.
#include "core/cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_cuda_sm90.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

// Per row and head, with heads first: log2 e times lse, and <do, o>.
struct RowSums {
  float *lse2, *delta;  // [batch, heads, rows]
};

// A warp is a row; 4 rows of a head after another share a line of the outputs.
template <int kValues>
__global__ void __launch_bounds__(256)
    row_sums_kernel(RowSums out, const T* dout, const T* o, const float* lse, AttentionSizes z) {
  constexpr int kPer = kValues / 32;
  const int lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * int64_t{8} + threadIdx.x / 32, b = blockIdx.z;
  const int h = blockIdx.y;
  if (row >= z.rows) return;
  const int64_t at = (b * z.rows + row) * z.heads + h;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; i += 2) {
    const int c = lane * kPer + i;
    const auto x = *reinterpret_cast<const uint32_t*>(dout + at * kValues + c),
               y = *reinterpret_cast<const uint32_t*>(o + at * kValues + c);
    sum += low_bf16(x) * low_bf16(y) + high_bf16(x) * high_bf16(y);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0) return;
  const int64_t to = (b * z.heads + h) * z.rows + row;
  out.delta[to] = sum;
  out.lse2[to] = lse[at] * kLog2E;
}

struct Maps {
  CUtensorMap q, dout, k, v;
};

// dk and dv: a block is 128 keys of one kv head of one sequence. Sums of width 192 leave registers for 32 queries only.
template <int kWidth_, int kValues_>
struct DkvTile {
  static constexpr int kWidth = kWidth_, kValues = kValues_;
  static constexpr int kKeys = 128, kQueries = kWidth == 192 ? 32 : 64, kStages = kWidth == 64 ? 4 : 192 / kQueries;
  using Keys = Sm90Tile<kKeys, kWidth>;
  using Values = Sm90Tile<kKeys, kValues>;
  using Queries = Sm90Tile<kQueries, kWidth>;
  using Outputs = Sm90Tile<kQueries, kValues>;
  struct Columns {  // of the queries of a stage
    float lse2[kQueries], delta[kQueries];
    int first[kQueries];
  };
  struct Shared {
    unsigned char k[Keys::kBytes], v[Values::kBytes];
    unsigned char q[kStages][Queries::kBytes], dout[kStages][Outputs::kBytes];
    Columns columns[kStages];
    uint64_t keys_full, full[kStages], empty[kStages];
    int rows_end;
  };
};

// Which query head of the group and which row a step works on: heads in order, rows in order.
struct DkvWalk {
  int first_row, end_row, rows_of_step, steps;
  int row = first_row, head = 0;
  __device__ void next() {
    row += rows_of_step;
    if (row >= end_row) row = first_row, ++head;
  }
};

// How a stage's columns are handed over. To the readers: each producer lane writes and arrives at `full`
// (mbarrier.arrive releases in the block), and a reader's wait for that phase (try_wait acquires) sees all its
// arrivals: the writes come first. Back: the lanes of a reading warp read, __syncwarp orders that before the one
// arrival at `empty` that lane 0 makes for them, and the producer's wait orders the arrival before the next writes:
// order is transitive through the warp's barrier in the memory model of PTX. Tools that follow only the thread that
// arrives report a write after a read here. With an arrival of every lane they do not: that is 256 a step instead of 8.
template <class Tile>
__device__ void produce_queries(typename Tile::Shared& shared, const Maps& maps, const RowSums& sums,
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
    typename Tile::Columns& columns = shared.columns[ring.stage];
    const int64_t at = (int64_t{b} * z.heads + h) * z.rows;
#pragma unroll
    for (int i = lane; i < Tile::kQueries; i += 32) {
      const int r = walk.row + i;
      const bool exists = r < z.rows;
      columns.lse2[i] = exists ? sums.lse2[at + r] : 0.0f;
      columns.delta[i] = exists ? sums.delta[at + r] : 0.0f;
      columns.first[i] = exists ? static_cast<int>(first_key(z, b, r)) : 0x7fffffff;
    }
    mbarrier_arrive(full);
  }
}

// From scores [keys, queries] of a stage whose first query is at `position`: probabilities in place, 0 where unseen.
template <class Columns, int kNum>
__device__ __forceinline__ void probabilities_of(float (&s)[kNum], const Columns& columns, float scale2, int key,
                                                 int position) {
  const Fragment at = fragment();
  const int group_key = key - at.row;  // of the warpgroup's first row
  const bool whole = columns.first[2 * kNum - 1] <= group_key && position >= group_key + 63;
#pragma unroll
  for (int j = 0; j < kNum / 4; ++j) {
    const auto lse2 = *reinterpret_cast<const float2*>(columns.lse2 + 8 * j + at.col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[4 * j + 2 * i] = exp2_approx(s[4 * j + 2 * i] * scale2 - lse2.x);
      s[4 * j + 2 * i + 1] = exp2_approx(s[4 * j + 2 * i + 1] * scale2 - lse2.y);
    }
  }
  if (whole) return;
#pragma unroll
  for (int j = 0; j < kNum / 4; ++j) {
    const auto first = *reinterpret_cast<const int2*>(columns.first + 8 * j + at.col);
    const int query = position + 8 * j + at.col;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int my_key = key + 8 * i;
      if (my_key < first.x || my_key > query) s[4 * j + 2 * i] = 0;
      if (my_key < first.y || my_key > query + 1) s[4 * j + 2 * i + 1] = 0;
    }
  }
}

template <class Columns, int kNum>
__device__ __forceinline__ void dscores_of(float (&dp)[kNum], const float (&p)[kNum], const Columns& columns) {
  const int col = fragment().col;
#pragma unroll
  for (int j = 0; j < kNum / 4; ++j) {
    const auto delta = *reinterpret_cast<const float2*>(columns.delta + 8 * j + col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = 4 * j + 2 * i;
      dp[e] = p[e] * (dp[e] - delta.x);
      dp[e + 1] = p[e + 1] * (dp[e + 1] - delta.y);
    }
  }
}

template <class Tile>
__device__ void consume_queries(typename Tile::Shared& shared, T* dk_out, T* dv_out, const AttentionSizes& z,
                                DkvWalk walk, int kv_head, int key, int b) {
  using Keys = typename Tile::Keys;
  using Queries = typename Tile::Queries;
  using Outputs = typename Tile::Outputs;
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
  const auto start_scores = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    wgmma_fence();
    multiply_rows<Keys, Queries, kWidth>(s, smem_addr(shared.k), group_row, smem_addr(shared.q[ring.stage]));
    multiply_rows<typename Tile::Values, Outputs, kValues>(dp, smem_addr(shared.v), group_row,
                                                           smem_addr(shared.dout[ring.stage]));
  };
  Ring<Tile::kStages> ring;
  mbarrier_wait(smem_addr(&shared.keys_full), 0);
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
    // Not <1>: with dv running while ds is made there are too few registers, and the compiler serialises all products.
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
    wgmma_wait<2>();
    hold_registers(dk);
    hold_words(words);
    __syncwarp();  // one lane arrives for all that have read the columns
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.empty[stage]));
  }
  wgmma_wait<0>();
  hold_registers(dv);
  hold_registers(dk);
  const float scale[2] = {z.scale, z.scale}, one[2] = {1, 1};
  store_sums<kWidth>(dk_out, dk, scale, first_key_row, end, z.kv_heads, kv_head);
  store_sums<kValues>(dv_out, dv, one, first_key_row, end, z.kv_heads, kv_head);
}

template <class Tile>
__global__ void __launch_bounds__(kSm90Threads, 1)
    dkv_kernel(const __grid_constant__ Maps maps, T* dk, T* dv, RowSums sums, AttentionSizes z) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  const int kv_head = blockIdx.x, b = blockIdx.y, key = blockIdx.z * Tile::kKeys;  // the longest first
  const int first_row = key > z.shift ? static_cast<int>(key - z.shift) : 0;       // the first that sees a key
  if (threadIdx.x < 32) {
    const int64_t key_end = key + Tile::kKeys < z.kv_rows ? key + Tile::kKeys : z.kv_rows;
    const int64_t rows_end = seen_end(z, b, first_row, key_end);
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
    consume_queries<Tile>(shared, dk, dv, z, walk, kv_head, key, b);
  }
}

// dq: a block is 128 queries of one head of one sequence. Where sums of width 192 leave no registers for them, rows of
// do are read from shared memory each time.
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
__device__ void produce_keys(typename Tile::Shared& shared, const Maps& maps, const DqWork& w) {
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

// What a thread knows of its two rows.
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
  if constexpr (Tile::kHoldsOutputs) load_words<Outputs, kValues>(dout, smem_addr(shared.dout), group_row);
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
    dq_kernel(const __grid_constant__ Maps maps, T* dq, RowSums sums, AttentionSizes z) {
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

template <int kWidth, int kValues>
void launch(Stream& s, const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  const cudaStream_t stream = cuda_stream(s);
  auto* const lse2 = static_cast<float*>(a.scratch.data);
  const RowSums sums{lse2, lse2 + a.lse_TH.numel()};
  const auto batch = static_cast<unsigned>(a.batch);
  row_sums_kernel<kValues><<<dim3(static_cast<unsigned>(div_ceil(z.rows, 8)), z.heads, batch), 256, 0, stream>>>(
      sums, static_cast<const T*>(a.do_THd.data), static_cast<const T*>(a.o_THd.data), a.lse_TH.ptr<float>(), z);
  check_launch("attention_bwd");

  const auto maps = [&](uint32_t queries, uint32_t keys) {
    return Maps{.q = rows_map(a.q_THd, a.batch, queries),
                .dout = rows_map(a.do_THd, a.batch, queries),
                .k = rows_map(a.k_TGd, a.batch, keys),
                .v = rows_map(a.v_TGd, a.batch, keys)};
  };
  using Dkv = DkvTile<kWidth, kValues>;
  using Dq = DqTile<kWidth, kValues>;
  constexpr int kDkvBytes = sizeof(typename Dkv::Shared), kDqBytes = sizeof(typename Dq::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(dkv_kernel<Dkv>, cudaFuncAttributeMaxDynamicSharedMemorySize, kDkvBytes));
  MOEBIUS_CUDA(cudaFuncSetAttribute(dq_kernel<Dq>, cudaFuncAttributeMaxDynamicSharedMemorySize, kDqBytes));
  dkv_kernel<Dkv><<<dim3(z.kv_heads, batch, static_cast<unsigned>(div_ceil(z.kv_rows, Dkv::kKeys))), kSm90Threads,
                    kDkvBytes, stream>>>(maps(Dkv::kQueries, Dkv::kKeys), static_cast<T*>(a.dk_TGd.data),
                                         static_cast<T*>(a.dv_TGd.data), sums, z);
  check_launch("attention_bwd");
  dq_kernel<Dq>
      <<<dim3(z.heads, batch, static_cast<unsigned>(div_ceil(z.rows, Dq::kQueries))), kSm90Threads, kDqBytes, stream>>>(
          maps(Dq::kQueries, Dq::kKeys), static_cast<T*>(a.dq_THd.data), sums, z);
  check_launch("attention_bwd");
}

}  // namespace

int64_t sm90_scratch_bytes(const AttentionBwd& a) { return 2 * a.lse_TH.num_bytes(); }

void sm90_attention_bwd(Stream& s, const AttentionBwd& a) {
  if (a.q_THd.dim(2) == 64)
    launch<64, 64>(s, a);
  else if (a.q_THd.dim(2) == 128)
    launch<128, 128>(s, a);
  else
    launch<192, 128>(s, a);
}

}  // namespace moebius::cuda
