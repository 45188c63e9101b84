// The forward pass of bf16 on sm_90a, for heads of 64, 128, and 192 with values of 128: tiles of
// 128 queries against tiles of 128 keys with a running softmax in base 2. The scores of the next
// tile are multiplied while the probabilities of this one are made.
#include "device/cuda/cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/sm90/attention.h"

namespace moebius::cuda {
namespace {

using T = __nv_bfloat16;

struct Maps {
  CUtensorMap q, k, v;
};

template <int kWidth, int kValues>
struct FwdTile {
  static constexpr int kRows = 128, kStages = kWidth == 64 ? 4 : 2;  // of queries, and of keys
  using Rows = Sm90Tile<kRows, kWidth>;
  using Values = Sm90Tile<kRows, kValues>;
  struct Shared {
    unsigned char q[Rows::kBytes];
    unsigned char k[kStages][Rows::kBytes], v[kStages][Values::kBytes];
    uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  };
};

// A block's work: queries from row `row` of head h, keys in `steps` tiles from `key`.
struct Work {
  int h, kv_head, steps;
  int64_t row, key, b;
};

template <class Tile>
__device__ void produce(typename Tile::Shared& shared, const Maps& maps, const Work& w) {
  using Rows = typename Tile::Rows;
  using Values = typename Tile::Values;
  if (w.steps == 0) return;
  const uint32_t q_full = smem_addr(&shared.q_full);
  mbarrier_arrive_expect(q_full, Rows::kBytes);
  Rows::load(smem_addr(shared.q), &maps.q, q_full, w.h, w.row, w.b);
  for (int step = 0; step < w.steps; ++step) {
    const int stage = step % Tile::kStages;
    const int64_t key = w.key + int64_t{step} * Tile::kRows;
    const uint32_t k_full = smem_addr(&shared.k_full[stage]), v_full = smem_addr(&shared.v_full[stage]);
    const uint32_t parity = (step / Tile::kStages + 1) & 1;
    mbarrier_wait(smem_addr(&shared.k_empty[stage]), parity);
    mbarrier_arrive_expect(k_full, Rows::kBytes);
    Rows::load(smem_addr(shared.k[stage]), &maps.k, k_full, w.kv_head, key, w.b);
    mbarrier_wait(smem_addr(&shared.v_empty[stage]), parity);
    mbarrier_arrive_expect(v_full, Values::kBytes);
    Values::load(smem_addr(shared.v[stage]), &maps.v, v_full, w.kv_head, key, w.b);
  }
}

// A thread's two rows: what they see, and their softmax so far (max of scores
// times scale2; this thread's part of the sum).
struct Softmax {
  int first[2], last[2];
  float max2[2], sum[2];
};

// Scores become probabilities relative to the new maximum; `correction` is what older sums are to
// be multiplied by.
__device__ __forceinline__ void take_scores(float (&s)[64], Softmax& run, float (&correction)[2], float scale2, int key,
                                            bool whole) {
  const int col = fragment().col;
  if (!whole) {
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int i = e / 2 % 2, at = key + e / 4 * 8 + col + e % 2;
      if (at < run.first[i] || at > run.last[i]) s[e] = -INFINITY;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float tile_max = s[2 * i];
#pragma unroll
    for (int j = 0; j < 16; ++j) tile_max = fmaxf(tile_max, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 2));
    const float new_max = fmaxf(run.max2[i], tile_max * scale2);
    const float base = new_max == -INFINITY ? 0.0f : new_max;  // nothing seen yet
    correction[i] = exp2_approx(run.max2[i] - base);
    run.max2[i] = new_max;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * i + c];
        x = exp2_approx(x * scale2 - base);
        sum += x;
      }
    }
    run.sum[i] = run.sum[i] * correction[i] + sum;
  }
}

// The two warpgroups ask for their products in turn, so that one's softmax runs during
// the other's products.
class Turn {
 public:
  __device__ explicit Turn(int group) : group_(group) {
    if (group == 1) pass();
  }
  __device__ void wait() const { named_barrier_sync(1 + group_, 2 * kGroupThreads); }
  __device__ void pass() const { named_barrier_arrive(2 - group_, 2 * kGroupThreads); }

 private:
  int group_;
};

// Writes the result of 64 rows that see no key.
template <int kValues>
__device__ void store_unseen(T* o, float* lse, const AttentionSizes& z, const Work& w, int64_t row) {
  store_zeros<kValues>(o, w.b * z.rows + row, w.b * z.rows + z.rows, z.heads, w.h);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = row + fragment().row + 8 * i;
    if (threadIdx.x % 4 == 0 && r < z.rows) lse[(w.b * z.rows + r) * z.heads + w.h] = -INFINITY;
  }
}

template <int kWidth, int kValues>
__device__ void consume(typename FwdTile<kWidth, kValues>::Shared& shared, T* o_out, float* lse,
                        const AttentionSizes& z, const Work& w) {
  using Tile = FwdTile<kWidth, kValues>;
  using Rows = typename Tile::Rows;
  const int group_row = (threadIdx.x / kGroupThreads - 1) * 64;
  const int64_t row = w.row + group_row;
  if (w.steps == 0) return store_unseen<kValues>(o_out, lse, z, w, row);
  Softmax run;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = row + fragment().row + 8 * i;
    run.first[i] = r < z.rows ? static_cast<int>(first_key(z, w.b, r)) : 0;
    run.last[i] = r < z.rows ? static_cast<int>(last_key(z, r)) : -1;
    run.max2[i] = -INFINITY, run.sum[i] = 0;
  }
  // All 64 rows see the keys in [last_first, first_last].
  const int first_last = static_cast<int>(last_key(z, row)),
            last_first = row + 63 < z.rows ? static_cast<int>(first_key(z, w.b, row + 63)) : 0x7fffffff;
  const float scale2 = z.scale * kLog2E;
  float o[kValues / 2] = {}, s[64];
  uint32_t words[32] = {};
  const auto start_scores = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.k_full[ring.stage]), ring.parity);
    wgmma_fence();
    multiply_rows<Rows, Rows, kWidth>(s, smem_addr(shared.q), group_row, smem_addr(shared.k[ring.stage]));
  };
  const auto start_sums = [&](const Ring<Tile::kStages>& ring) {
    mbarrier_wait(smem_addr(&shared.v_full[ring.stage]), ring.parity);
    hold_words(words);
    wgmma_fence();
    add_product<typename Tile::Values, 8>(o, words, smem_addr(shared.v[ring.stage]));
  };
  const Turn turn(threadIdx.x / kGroupThreads - 1);
  const bool is_first_lane = threadIdx.x % 32 == 0;
  Ring<Tile::kStages> ring;
  mbarrier_wait(smem_addr(&shared.q_full), 0);
  start_scores(ring);
  wgmma_wait<0>();
  for (int step = 0;;) {
    // Here the scores of this step are ready, and the product of the last step's probabilities
    // may still run.
    hold_registers(s);
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.k_empty[ring.stage]));
    const int key = static_cast<int>(w.key) + step * Tile::kRows;
    float correction[2];
    take_scores(s, run, correction, scale2, key, key >= last_first && key + Tile::kRows - 1 <= first_last);
    wgmma_wait<0>();
    hold_registers(o);
    hold_words(words);
    if (step > 0 && is_first_lane) mbarrier_arrive(smem_addr(&shared.v_empty[ring.last()]));
#pragma unroll
    for (int e = 0; e < kValues / 2; ++e) o[e] *= correction[e / 2 % 2];
    pack(words, s);
    if (++step == w.steps) break;
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
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = run.sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    inverse[i] = sum == 0 ? 0.0f : 1.0f / sum;  // 0: no key seen
    const int64_t r = row + fragment().row + 8 * i;
    if (threadIdx.x % 4 == 0 && r < z.rows) {
      lse[(w.b * z.rows + r) * z.heads + w.h] = (run.max2[i] + log2f(sum)) * kLn2;
    }
  }
  store_sums<kValues>(o_out, o, inverse, w.b * z.rows + row, w.b * z.rows + z.rows, z.heads, w.h);
}

template <int kWidth, int kValues>
__global__ void __launch_bounds__(kSm90Threads, 1)
    fwd_kernel(const __grid_constant__ Maps maps, T* o, float* lse, AttentionSizes z) {
  using Tile = FwdTile<kWidth, kValues>;
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(raw);
  Work w;
  w.h = blockIdx.x, w.kv_head = w.h / (z.heads / z.kv_heads), w.b = blockIdx.z;
  w.row = int64_t{gridDim.y - 1 - blockIdx.y} * Tile::kRows;  // the longest first
  const int64_t end = last_key(z, (w.row + Tile::kRows < z.rows ? w.row + Tile::kRows : z.rows) - 1) + 1;
  w.key = first_key(z, w.b, w.row) / Tile::kRows * Tile::kRows;
  w.steps = end > w.key ? static_cast<int>((end - w.key + Tile::kRows - 1) / Tile::kRows) : 0;
  if (threadIdx.x == 0) {
    mbarrier_init(smem_addr(&shared.q_full), 1);
    for (int i = 0; i < Tile::kStages; ++i) {
      mbarrier_init(smem_addr(&shared.k_full[i]), 1);
      mbarrier_init(smem_addr(&shared.v_full[i]), 1);
      mbarrier_init(smem_addr(&shared.k_empty[i]), kConsumerWarps);
      mbarrier_init(smem_addr(&shared.v_empty[i]), kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<Tile>(shared, maps, w);
  } else {
    more_registers<kConsumerRegisters>();
    consume<kWidth, kValues>(shared, o, lse, z, w);
  }
}

template <int kWidth, int kValues>
void launch(Stream& s, const AttentionFwd& a) {
  using Tile = FwdTile<kWidth, kValues>;
  void (*const kernel)(Maps, T*, float*, AttentionSizes) = fwd_kernel<kWidth, kValues>;
  const AttentionSizes z = attention_sizes(a);
  constexpr int kSharedBytes = sizeof(typename Tile::Shared);
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const Maps maps{.q = rows_map(a.q_THd, a.batch, Tile::kRows),
                  .k = rows_map(a.k_UGd, a.batch, Tile::kRows),
                  .v = rows_map(a.v_UGd, a.batch, Tile::kRows)};
  const dim3 grid(z.heads, static_cast<unsigned>(div_ceil(z.rows, Tile::kRows)), static_cast<unsigned>(a.batch));
  kernel<<<grid, kSm90Threads, kSharedBytes, cuda_stream(s)>>>(maps, static_cast<T*>(a.o_THd.data),
                                                               a.lse_TH.ptr<float>(), z);
  check_launch("attention_fwd");
}

}  // namespace

void sm90_attention_fwd(Stream& s, const AttentionFwd& a) {
  if (a.q_THd.dim(2) == 64)
    launch<64, 64>(s, a);
  else if (a.q_THd.dim(2) == 128)
    launch<128, 128>(s, a);
  else
    launch<192, 128>(s, a);
}

}  // namespace moebius::cuda
