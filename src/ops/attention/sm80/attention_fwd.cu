// The forward pass of bf16 with mma.sync. A block has a tile of queries of one head of one sequence, and loops over
// tiles of the keys that they attend to, with a running softmax in base 2. Values are copied during the product of
// scores, and the next keys during the product of values.
#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/sm80/launch.h"

namespace moebius::cuda {
namespace sm80 {
namespace {

struct FwdParams {
  Operand q, k, v;
  Result o;
  float* lse;
  AttentionSizes z;
};

// The running softmax of a lane's rows: the largest score times scale2, and the lane's part of the sum.
template <int kM>
struct Softmax {
  float max2[kM][2], sum[kM][2];
};

// Sets the scores of masked keys from `key` to -inf. The lane's first row is query `row`.
template <int kM, int kN>
__device__ __forceinline__ void mask(float (&s)[kM][kN][4], const AttentionSizes& z, const int* first, int row,
                                     int key) {
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int first_seen = first[8 * i], last_seen = static_cast<int>(last_key(z, row + 8 * i));
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = key + 8 * j + lane_col() + c;
        if (at < first_seen || at > last_seen) s[i / 2][j][i % 2 * 2 + c] = -INFINITY;
      }
    }
  }
}

// Replaces scores by probabilities relative to the new maximum, and rescales sums to it.
template <int kM, int kN, int kColumns>
__device__ __forceinline__ void take_scores(float (&s)[kM][kN][4], Softmax<kM>& run, float (&o)[kM][kColumns][4],
                                            float scale2) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_max = s[i][0][2 * r];
#pragma unroll
      for (int j = 0; j < kN; ++j) tile_max = fmaxf(tile_max, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, 2));
      const float new_max = fmaxf(run.max2[i][r], tile_max * scale2);
      const float base = new_max == -INFINITY ? 0.0f : new_max;  // the row has had no key yet
      const float correction = exp2_approx(run.max2[i][r] - base);
      run.max2[i][r] = new_max;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[i][j][2 * r + c];
          x = exp2_approx(x * scale2 - base);
          sum += x;
        }
      }
      run.sum[i][r] = run.sum[i][r] * correction + sum;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        o[i][j][2 * r] *= correction;
        o[i][j][2 * r + 1] *= correction;
      }
    }
  }
}

template <int kWidth>
constexpr PortableAttentionTile kFwdTile = portable_attention_tile(AttentionPass::fwd, kWidth);

template <int kWidth>
__global__ void __launch_bounds__(32 * kFwdTile<kWidth>.max_warps, kFwdTile<kWidth>.blocks)
    fwd_kernel(const __grid_constant__ FwdParams p) {
  constexpr int kRows = kFwdTile<kWidth>.warp_rows, kM = kRows / 16, kKeys = kFwdTile<kWidth>.step_rows;
  using Rows = HeadTile<kWidth>;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionSizes& z = p.z;
  const int queries = blockDim.x / 32 * kRows, rows = static_cast<int>(z.rows), kv_rows = static_cast<int>(z.kv_rows);
  const uint32_t q = shared_address(shared), k = q + queries * Rows::kRowBytes, v = k + kKeys * Rows::kRowBytes;
  int* const first = reinterpret_cast<int*>(shared + (queries + 2 * kKeys) * Rows::kRowBytes);

  const int h = blockIdx.x, kv_head = h / (z.heads / z.kv_heads), b = blockIdx.z;
  const int row = (gridDim.y - 1 - blockIdx.y) * queries;  // the longest first
  const int key_begin = static_cast<int>(first_key(z, b, row)) / kKeys * kKeys,
            key_end = static_cast<int>(last_key(z, min(row + queries, rows) - 1)) + 1;
  const HeadRows keys = p.k.of(b * z.kv_rows, kv_head), values = p.v.of(b * z.kv_rows, kv_head);
  if (key_begin < key_end) {
    Rows::copy(q, p.q.of(b * z.rows, h), row, rows, queries);
    Rows::copy(k, keys, key_begin, kv_rows, kKeys);
    commit_copies();
  }
  for (int i = threadIdx.x; i < queries; i += blockDim.x)
    first[i] = row + i < rows ? static_cast<int>(first_key(z, b, row + i)) : 0;

  const int in_block = threadIdx.x / 32 * kRows, my_row = row + in_block;
  const SeenKeys seen = SeenKeys::of(z, b, my_row, min(my_row + kRows, rows));
  const LeftRows<kWidth, kM> my_queries{q, in_block};
  const Lane left_lane = Rows::left_lane(), right_lane = Rows::right_lane();
  const float scale2 = z.scale * kLog2E;
  Sums<kRows, kWidth> o;
  clear(o);
  Softmax<kM> run;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) run.max2[i / 2][i % 2] = -INFINITY, run.sum[i / 2][i % 2] = 0;

  for (int key = key_begin; key < key_end; key += kKeys) {
    wait_copies<0>();
    __syncthreads();  // keys have arrived, and all threads have read the last values
    Rows::copy(v, values, key, kv_rows, kKeys);
    commit_copies();
    const bool sees = seen.some(key, kKeys);
    Sums<kRows, kKeys> s;
    if (sees) multiply_rows<kWidth>(s, my_queries, k, right_lane);
    wait_copies<0>();
    __syncthreads();  // values have arrived, and all threads have read these keys
    if (key + kKeys < key_end) Rows::copy(k, keys, key + kKeys, kv_rows, kKeys);
    commit_copies();
    if (!sees) continue;
    if (!seen.all(key, kKeys)) mask(s, z, first + in_block + lane_row(), my_row + lane_row(), key);
    take_scores(s, run, o, scale2);
    Words<kRows, kKeys> words;
    pack_words(words, s);
    add_product<kWidth>(o, words, v, left_lane);
  }

  const int64_t base = b * z.rows;
  float inverse[kM][2];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    float sum = run.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    inverse[i / 2][i % 2] = sum == 0 ? 0.0f : 1.0f / sum;  // 0: the row has no key
    const int r = my_row + lane_row() + 8 * i;
    if (threadIdx.x % 4 == 0 && r < rows)
      p.lse[(base + r) * z.heads + h] = (run.max2[i / 2][i % 2] + log2f(sum)) * kLn2;
  }
  p.o.store(o, inverse, base + my_row, base + rows, h);
}

}  // namespace
}  // namespace sm80

void sm80_attention_fwd(Stream& s, const AttentionFwd& a) {
  const AttentionSizes z = attention_sizes(a);
  const sm80::FwdParams p{.q = sm80::operand(a.q_THd),
                          .k = sm80::operand(a.k_UGd),
                          .v = sm80::operand(a.v_UGd),
                          .o = sm80::result(a.o_THd),
                          .lse = a.lse_TH.ptr<float>(),
                          .z = z};
  sm80::with_attention_config(s, AttentionPass::fwd, z, [&]<int kWidth>(const PortableAttentionConfig& config) {
    const dim3 blocks(z.heads, portable_attention_blocks("attention_fwd", config, z.rows),
                      static_cast<unsigned>(a.batch));
    sm80::launch_attention(s, "attention_fwd", sm80::fwd_kernel<kWidth>, blocks, config, p);
  });
}

}  // namespace moebius::cuda
