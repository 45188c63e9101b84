// The forward pass of bf16 on sm_90a, for heads of 64, 128, and 192 with values of 128: tiles of
// 128 or 192 queries against tiles of 128 keys with a running softmax in base 2. The scores of the
// next tile are multiplied while the probabilities of this one are made.
//
// Each multiprocessor has one block, which takes one tile of queries after the other. The first keys of the next tile
// arrive while it ends the last one.
#include <algorithm>
#include <climits>

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/sm90/attention.h"
#include "ops/attention/sm90/query_tile_order.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

struct Maps {
  CUtensorMap q, k, v;
};

// kGroups warpgroups multiply, each 64 queries. Narrow heads leave registers for three of them.
template <int kWidth_, int kValues_>
struct FwdTile {
  static constexpr int kWidth = kWidth_, kValues = kValues_, kGroups = kWidth == 64 ? 3 : 2;
  static constexpr int kRows = 64 * kGroups, kKeys = 128, kStages = kWidth == 64 ? 4 : 2;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads, kWarps = 4 * kGroups;
  // A thread of the warpgroup that loads has kLoadRegisters, and one that multiplies has kRegisters.
  static constexpr uint32_t kLoadRegisters = kGroups == 3 ? 32 : 40, kRegisters = kGroups == 3 ? 160 : 232;
  using Queries = Sm90Tile<kRows, kWidth>;
  using Keys = Sm90Tile<kKeys, kWidth>;
  using Values = Sm90Tile<kKeys, kValues>;
  struct Shared {
    unsigned char q[Queries::kBytes];
    unsigned char k[kStages][Keys::kBytes], v[kStages][Values::kBytes];
    uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
};

// A tile's work: queries from row `row` of head h, keys in `steps` tiles from `key`.
struct Work {
  int b, h, row, key, steps;
};

// The last key that query `row` attends to; of the last query, if there are not so many.
__device__ __forceinline__ int last_seen(const AttentionSizes& z, int row) {
  return static_cast<int>(last_key(z, min(int64_t{row}, z.rows - 1)));
}

// Returns what this block does in a round; no steps and no row of a sequence if nothing.
template <class Tile>
__device__ __forceinline__ Work work_of(const AttentionSizes& z, const QueryTileOrder& order, int round) {
  Work w = {.b = 0, .h = 0, .row = static_cast<int>(z.rows), .key = 0, .steps = 0};
  const QueryTile tile = order.tile_of(round, static_cast<int>(blockIdx.x));
  if (tile.head < 0) return w;
  w.b = tile.head / z.heads, w.h = tile.head % z.heads;
  w.row = tile.tile * Tile::kRows;
  const int end = last_seen(z, w.row + Tile::kRows - 1) + 1;
  w.key = static_cast<int>(first_key(z, w.b, w.row)) / Tile::kKeys * Tile::kKeys;
  w.steps = max(0, (end - w.key + Tile::kKeys - 1) / Tile::kKeys);
  return w;
}

template <class Tile>
__device__ void produce(typename Tile::Shared& shared, const Maps& maps, const AttentionSizes& z,
                        const QueryTileOrder& order) {
  const uint32_t q_full = smem_addr(&shared.q_full);
  uint32_t q_parity = 0;
  Ring<Tile::kStages> ring;
  const int rounds = order.rounds();
  for (int round = 0; round < rounds; ++round) {
    const Work w = work_of<Tile>(z, order, round);
    if (w.steps == 0) continue;
    const int kv_head = w.h / (z.heads / z.kv_heads);
    mbarrier_wait(smem_addr(&shared.q_empty), q_parity ^ 1);
    mbarrier_arrive_expect(q_full, Tile::Queries::kBytes);
    Tile::Queries::load(smem_addr(shared.q), &maps.q, q_full, w.h, w.row, w.b);
    q_parity ^= 1;
    for (int step = 0; step < w.steps; ++step, ring.advance()) {
      const int stage = ring.stage;
      const int key = w.key + step * Tile::kKeys;
      const uint32_t k_full = smem_addr(&shared.k_full[stage]), v_full = smem_addr(&shared.v_full[stage]);
      mbarrier_wait(smem_addr(&shared.k_empty[stage]), ring.parity ^ 1);
      mbarrier_arrive_expect(k_full, Tile::Keys::kBytes);
      Tile::Keys::load(smem_addr(shared.k[stage]), &maps.k, k_full, kv_head, key, w.b);
      mbarrier_wait(smem_addr(&shared.v_empty[stage]), ring.parity ^ 1);
      mbarrier_arrive_expect(v_full, Tile::Values::kBytes);
      Tile::Values::load(smem_addr(shared.v[stage]), &maps.v, v_full, kv_head, key, w.b);
    }
  }
}

// The running softmax of a thread's two rows: the base of exponents, and this thread's part of the sum.
struct Softmax {
  float base2[2], sum[2];
};

// Clears the scores of keys that a query does not attend to. s: of the keys from `key` on; row: the thread's first.
__device__ __forceinline__ void mask_scores(float (&s)[64], const AttentionSizes& z, int b, int row, int key) {
  const int col = key + fragment().col;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + 8 * i, last = last_seen(z, r) - col;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * j + c > last) s[4 * j + 2 * i + c] = -INFINITY;
    }
    if (r >= z.rows || (z.window == 0 && !z.doc_start)) continue;
    const int first = static_cast<int>(first_key(z, b, r)) - col;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * j + c < first) s[4 * j + 2 * i + c] = -INFINITY;
    }
  }
}

// Scores become probabilities relative to a base of each row; `correction` is what older sums are to be multiplied by.
// Returns whether a lane of the warp has one other than 1.
//
// The base is the maximum so far, or was it not long ago: it stays while no score is above it by more than kSlack.
// So no probability is above 2^kSlack, and most tiles correct nothing.
__device__ __forceinline__ bool take_scores(float (&s)[64], Softmax& run, float (&correction)[2], float scale2) {
  constexpr float kSlack = 8;
  bool corrects = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float tile_max = s[2 * i];
#pragma unroll
    for (int j = 0; j < 16; ++j) tile_max = fmaxf(tile_max, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 2));
    const float tile_max2 = tile_max * scale2;
    correction[i] = 1;
    if (tile_max2 > run.base2[i] + kSlack) {
      correction[i] = exp2_approx(run.base2[i] - tile_max2);
      run.base2[i] = tile_max2;
      run.sum[i] *= correction[i];
      corrects = true;
    }
    const float base = run.base2[i] == -INFINITY ? 0.0f : run.base2[i];  // nothing seen yet
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * i + c];
        x = exp2_approx(x * scale2 - base);
        run.sum[i] += x;
      }
    }
  }
  return __any_sync(~0u, corrects);
}

// The warpgroups ask for their products in turn, so that one's softmax runs during the products of another.
template <int kGroups>
class Turn {
 public:
  __device__ explicit Turn(int group) : group_(group) {
    if (group == kGroups - 1) pass();
  }
  __device__ void wait() const { named_barrier_sync(1 + group_, 2 * kGroupThreads); }
  __device__ void pass() const { named_barrier_arrive(1 + (group_ + 1) % kGroups, 2 * kGroupThreads); }

 private:
  int group_;
};

// Writes the result of 64 rows that see no key.
template <int kValues>
__device__ void store_unseen(T* o, float* lse, const AttentionSizes& z, const Work& w, int row) {
  const int64_t begin = w.b * z.rows;
  store_zeros<kValues>(o, begin + row, begin + z.rows, z.heads, w.h);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + fragment().row + 8 * i;
    if (threadIdx.x % 4 == 0 && r < z.rows) lse[(begin + r) * z.heads + w.h] = -INFINITY;
  }
}

// Writes the result of 64 rows.
template <class Tile>
__device__ __forceinline__ void store(T* o_out, float* lse, const AttentionSizes& z, int b, int h, int row,
                                      const float (&o)[Tile::kValues / 2], const Softmax& run) {
  asm volatile("" : "+r"(b));  // computes the addresses here: in the loop before there are no registers for them
  const int64_t begin = b * z.rows;
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = run.sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    inverse[i] = sum == 0 ? 0.0f : 1.0f / sum;  // 0: no key seen
    const int r = row + fragment().row + 8 * i;
    if (threadIdx.x % 4 == 0 && r < z.rows) {
      lse[(begin + r) * z.heads + h] = (run.base2[i] + log2f(sum)) * kLn2;
    }
  }
  store_sums<Tile::kValues>(o_out, o, inverse, begin + row, begin + z.rows, z.heads, h);
}

template <class Tile>
__device__ void consume(typename Tile::Shared& shared, T* o_out, float* lse, const AttentionSizes& z,
                        const QueryTileOrder& order, float scale2) {
  constexpr int kOut = Tile::kValues / 2;
  // The same in all lanes, which the compiler cannot deduce.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads - 1, 0), group_row = group * 64;
  float o[kOut], s[64];
  uint32_t words[32] = {};
  const auto start_scores = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.k_full[ring.stage]), ring.parity);
    wgmma_fence();
    multiply_rows<typename Tile::Queries, typename Tile::Keys, Tile::kWidth>(s, smem_addr(shared.q), group_row,
                                                                             smem_addr(shared.k[ring.stage]));
  };
  const auto start_sums = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.v_full[ring.stage]), ring.parity);
    hold_words(words);
    wgmma_fence();
    add_product<typename Tile::Values, 8>(o, words, smem_addr(shared.v[ring.stage]));
  };
  const Turn<Tile::kGroups> turn(group);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const auto release = [&](uint64_t& barrier) {
    if (is_first_lane) mbarrier_arrive(smem_addr(&barrier));
  };
  Ring<Tile::kStages> ring;
  uint32_t q_parity = 0;
  const int rounds = order.rounds();
  for (int round = 0; round < rounds; ++round) {
    const Work w = work_of<Tile>(z, order, round);
    const int row = w.row + group_row;
    if (w.steps == 0) {
      store_unseen<Tile::kValues>(o_out, lse, z, w, row);
      continue;
    }
    // All 64 rows attend to the keys in [last_first, first_last], and none to keys of later steps than my_steps.
    const int first_last = last_seen(z, row),
              last_first = row + 63 < z.rows ? static_cast<int>(first_key(z, w.b, row + 63)) : INT_MAX,
              my_steps = max(1, min(w.steps, (last_seen(z, row + 63) - w.key) / Tile::kKeys + 1));
    Softmax run{.base2 = {-INFINITY, -INFINITY}, .sum = {}};
#pragma unroll
    for (int e = 0; e < kOut; ++e) o[e] = 0;
    mbarrier_wait(smem_addr(&shared.q_full), q_parity);
    q_parity ^= 1;
    start_scores(ring);
    wgmma_wait<0>();
    for (int step = 0;;) {
      // Here the scores of this step are ready, and the product of the last step's probabilities
      // may still run.
      hold_registers(s);
      release(shared.k_empty[ring.stage]);
      if (step + 1 == my_steps) release(shared.q_empty);
      const int key = w.key + step * Tile::kKeys;
      if (key < last_first || key + Tile::kKeys - 1 > first_last) mask_scores(s, z, w.b, row + fragment().row, key);
      float correction[2];
      const bool corrects = take_scores(s, run, correction, scale2);
      wgmma_wait<0>();
      hold_registers(o);
      hold_words(words);
      if (step > 0) release(shared.v_empty[ring.last()]);
      if (corrects) {
#pragma unroll
        for (int e = 0; e < kOut; ++e) o[e] *= correction[e / 2 % 2];
      }
      pack(words, s);
      if (++step == my_steps) break;
      const Ring<Tile::kStages> last = ring;
      ring.advance();
      turn.wait();
      start_scores(ring);
      start_sums(last);
      turn.pass();
      wgmma_wait<1>();
    }
    start_sums(ring);
    wgmma_wait<0>();
    hold_registers(o);
    release(shared.v_empty[ring.stage]);
    ring.advance();
    for (int step = my_steps; step < w.steps; ++step, ring.advance()) {  // keys that only other warpgroups need
      turn.wait();
      turn.pass();
      mbarrier_wait(smem_addr(&shared.k_full[ring.stage]), ring.parity);
      release(shared.k_empty[ring.stage]);
      mbarrier_wait(smem_addr(&shared.v_full[ring.stage]), ring.parity);
      release(shared.v_empty[ring.stage]);
    }
    store<Tile>(o_out, lse, z, w.b, w.h, row, o, run);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) fwd_kernel(const __grid_constant__ Maps maps, T* o, float* lse,
                                                                QueryTileOrder order, AttentionSizes z, float scale2) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  if (threadIdx.x == 0) {
    mbarrier_init(smem_addr(&shared.q_full), 1);
    mbarrier_init(smem_addr(&shared.q_empty), Tile::kWarps);
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(smem_addr(&shared.k_full[i]), 1);
      mbarrier_init(smem_addr(&shared.v_full[i]), 1);
      mbarrier_init(smem_addr(&shared.k_empty[i]), Tile::kWarps);
      mbarrier_init(smem_addr(&shared.v_empty[i]), Tile::kWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<Tile::kLoadRegisters>();
    if (threadIdx.x == 0) produce<Tile>(shared, maps, z, order);
  } else {
    more_registers<Tile::kRegisters>();
    consume<Tile>(shared, o, lse, z, order, scale2);
  }
}

// Returns the heads of a section. Each half of L2, of 25 MB, has the keys and values of two sections: blocks begin the
// next one while others end the last.
int section_heads(const AttentionSizes& z, int64_t batch) {
  constexpr int64_t kSectionBytes = int64_t{12} << 20;
  const int64_t kv_bytes = z.kv_rows * (z.width + z.v_width) * 2;
  return narrow<int>(std::clamp<int64_t>(kSectionBytes / kv_bytes, 1, batch * z.kv_heads) * (z.heads / z.kv_heads));
}

template <class Tile>
void launch(Stream& s, const AttentionFwd& a) {
  void (*const kernel)(Maps, T*, float*, QueryTileOrder, AttentionSizes, float) = fwd_kernel<Tile>;
  const AttentionSizes z = attention_sizes(a);
  constexpr int kSharedBytes = sizeof(typename Tile::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const Maps maps{.q = rows_map(a.q_THd, a.batch, Tile::kRows),
                  .k = rows_map(a.k_UGd, a.batch, Tile::kKeys),
                  .v = rows_map(a.v_UGd, a.batch, Tile::kKeys)};
  const int64_t heads = a.batch * z.heads, tiles_of_head = div_ceil(z.rows, Tile::kRows), tiles = heads * tiles_of_head;
  const int blocks = limited_blocks(s, narrow<int>(std::min<int64_t>(tiles, gpu_limits(s).num_multiprocessors)));
  const QueryTileOrder order{.tiles_of_head = narrow<int>(tiles_of_head),
                             .heads = narrow<int>(heads),
                             .section = section_heads(z, a.batch),
                             .blocks = blocks};
  kernel<<<blocks, Tile::kThreads, kSharedBytes, cuda_stream(s)>>>(maps, static_cast<T*>(a.o_THd.data),
                                                                   a.lse_TH.ptr<float>(), order, z, z.scale * kLog2E);
  check_launch("attention_fwd");
}

}  // namespace

void sm90_attention_fwd(Stream& s, const AttentionFwd& a) {
  if (a.q_THd.dim(2) == 64)
    launch<FwdTile<64, 64>>(s, a);
  else if (a.q_THd.dim(2) == 128)
    launch<FwdTile<128, 128>>(s, a);
  else
    launch<FwdTile<192, 128>>(s, a);
}

}  // namespace moebius::cuda
