// Computes dq of bf16 with mma.sync. A block has a tile of queries of one head of one sequence, and loops over the keys
// that they attend to. The rows of its scores are queries.
#include "ops/attention/sm80/attention_bwd.h"

namespace moebius::cuda::sm80 {
namespace {

// The values that a lane keeps of its rows.
template <int kM>
struct MyRows {
  float lse2[kM][2], delta[kM][2];
};

template <int kM>
__device__ __forceinline__ void load_my_rows(MyRows<kM>& mine, const RowSums& sums, int64_t base, int row, int end) {
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int r = row + 8 * i;
    mine.lse2[i / 2][i % 2] = r < end ? sums.lse2[base + r] : 0.0f;
    mine.delta[i / 2][i % 2] = r < end ? sums.delta[base + r] : 0.0f;
  }
}

// Replaces the scores of keys from `key` by probabilities, 0 for masked keys. The lane's first row is query `row`.
template <int kM, int kN>
__device__ __forceinline__ void take_exponentials(float (&s)[kM][kN][4], const MyRows<kM>& mine, float scale2) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = exp2_approx(s[i][j][e] * scale2 - mine.lse2[i][e / 2]);
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void mask(float (&p)[kM][kN][4], const AttentionSizes& z, const int* first, int row,
                                     int key) {
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int first_seen = first[8 * i], last_seen = static_cast<int>(last_key(z, row + 8 * i));
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = key + 8 * j + lane_col() + c;
        if (at < first_seen || at > last_seen) p[i / 2][j][i % 2 * 2 + c] = 0;
      }
    }
  }
}

template <int kWidth>
constexpr PortableAttentionTile kDqTile = portable_attention_tile(AttentionPass::dq, kWidth);

template <int kWidth>
__global__ void __launch_bounds__(32 * kDqTile<kWidth>.max_warps, kDqTile<kWidth>.blocks)
    dq_kernel(const __grid_constant__ BwdParams p, int stages) {
  constexpr int kRows = kDqTile<kWidth>.warp_rows, kM = kRows / 16, kKeys = kDqTile<kWidth>.step_rows;
  using Rows = HeadTile<kWidth>;
  constexpr int kOperandBytes = kKeys * Rows::kRowBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionSizes& z = p.z;
  const int queries = blockDim.x / 32 * kRows, rows = static_cast<int>(z.rows), kv_rows = static_cast<int>(z.kv_rows);
  const uint32_t q = shared_address(shared), dout = q + queries * Rows::kRowBytes,
                 ring = dout + queries * Rows::kRowBytes;
  int* const first = reinterpret_cast<int*>(shared + 2 * queries * Rows::kRowBytes + stages * 2 * kOperandBytes);

  const int h = blockIdx.x, kv_head = h / (z.heads / z.kv_heads), b = blockIdx.z;
  const int row = (gridDim.y - 1 - blockIdx.y) * queries;  // the longest first
  const int key_begin = static_cast<int>(first_key(z, b, row)) / kKeys * kKeys,
            key_end = static_cast<int>(last_key(z, min(row + queries, rows) - 1)) + 1;
  const auto load = [&](int key, int stage) {
    const uint32_t to = ring + stage * 2 * kOperandBytes;
    Rows::copy(to, p.k.of(b * z.kv_rows, kv_head), key, kv_rows, kKeys);
    Rows::copy(to + kOperandBytes, p.v.of(b * z.kv_rows, kv_head), key, kv_rows, kKeys);
    commit_copies();
  };
  if (key_begin < key_end) {
    Rows::copy(q, p.q.of(b * z.rows, h), row, rows, queries);
    Rows::copy(dout, p.dout.of(b * z.rows, h), row, rows, queries);
    load(key_begin, 0);
  }
  for (int i = threadIdx.x; i < queries; i += blockDim.x)
    first[i] = row + i < rows ? static_cast<int>(first_key(z, b, row + i)) : 0;

  const int in_block = threadIdx.x / 32 * kRows, my_row = row + in_block;
  const SeenKeys seen = SeenKeys::of(z, b, my_row, min(my_row + kRows, rows));
  const LeftRows<kWidth, kM> my_queries{q, in_block}, my_outputs{dout, in_block};
  const Lane left_lane = Rows::left_lane(), right_lane = Rows::right_lane();
  const float scale2 = z.scale * kLog2E;
  MyRows<kM> mine;
  load_my_rows(mine, p.sums, (int64_t{b} * z.heads + h) * z.rows, my_row + lane_row(), rows);
  Sums<kRows, kWidth> dq;
  clear(dq);
  for (int key = key_begin, stage = 0; key < key_end; key += kKeys) {
    wait_copies<0>();
    __syncthreads();  // these keys have arrived, and all threads have read the last ones
    const bool more = key + kKeys < key_end;
    const uint32_t k = ring + stage * 2 * kOperandBytes, v = k + kOperandBytes;
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (more && stages > 1) load(key + kKeys, stage);
    if (seen.some(key, kKeys)) {
      Sums<kRows, kKeys> s, dp;
      multiply_rows<kWidth>(s, my_queries, k, right_lane);
      multiply_rows<kWidth>(dp, my_outputs, v, right_lane);
      take_exponentials(s, mine, scale2);
      if (!seen.all(key, kKeys)) mask(s, z, first + in_block + lane_row(), my_row + lane_row(), key);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - mine.delta[i][e / 2]);
        }
      }
      Words<kRows, kKeys> ds;
      pack_words(ds, dp);
      add_product<kWidth>(dq, ds, k, left_lane);
    }
    if (more && stages == 1) {
      __syncthreads();
      load(key + kKeys, stage);
    }
  }
  float scale[kM][2];
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) scale[i / 2][i % 2] = z.scale;
  p.dq.store(dq, scale, b * z.rows + my_row, (b + int64_t{1}) * z.rows, h);
}

}  // namespace

void launch_dq(Stream& s, const AttentionBwd& a, const BwdParams& p) {
  with_attention_config(s, AttentionPass::dq, p.z, [&]<int kWidth>(const PortableAttentionConfig& config) {
    const dim3 blocks(p.z.heads, portable_attention_blocks("attention_bwd", config, p.z.rows),
                      static_cast<unsigned>(a.batch));
    launch_attention(s, "attention_bwd", dq_kernel<kWidth>, blocks, config, p, config.stages);
  });
}

}  // namespace moebius::cuda::sm80
