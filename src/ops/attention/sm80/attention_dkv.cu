// dk and dv of bf16 with mma.sync: a block is a tile of keys of one kv head of one sequence, and walks the
// queries that see them, of one query head after the other. Keys run along the rows of its scores. Heads
// wider than 128 leave no registers for both sums: then a block has either dk or dv.
#include "ops/attention/sm80/attention_bwd.h"

namespace moebius::cuda::sm80 {
namespace {

enum class Gradients { dk, dv, both };

// Scores become probabilities. The lane's columns are those of `lse2`.
template <int kN>
__device__ __forceinline__ void take_exponentials(float (&s)[1][kN][4], const float* lse2, float scale2) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 of = *reinterpret_cast<const float2*>(lse2 + 8 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][j][e] = exp2_approx(s[0][j][e] * scale2 - (e % 2 == 0 ? of.x : of.y));
  }
}

// Probabilities of what a query does not see become 0. The lane's first row is key `key`, its first column
// query `row`, whose document is at *doc_start.
template <int kN>
__device__ __forceinline__ void mask(float (&p)[1][kN][4], const AttentionSizes& z, const int* doc_start, int key,
                                     int row) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t at = key + e / 2 * 8, position = z.shift + row + 8 * j + e % 2;
      const bool in_window = z.window == 0 || at > position - z.window;
      const bool in_document = !z.doc_start || at >= doc_start[8 * j + e % 2] - z.kv_first;
      if (at > position || !in_window || !in_document) p[0][j][e] = 0;
    }
  }
}

template <int kWidth>
constexpr PortableAttentionTile kDkvTile = portable_attention_tile(AttentionPass::dkv, kWidth);

template <int kWidth, Gradients kGradients>
__global__ void __launch_bounds__(32 * kDkvTile<kWidth>.max_warps, kDkvTile<kWidth>.blocks)
    dkv_kernel(const __grid_constant__ BwdParams p, int stages) {
  constexpr int kRows = kDkvTile<kWidth>.warp_rows, kQueries = kDkvTile<kWidth>.step_rows;
  constexpr bool kHolds = kDkvTile<kWidth>.holds_rows, kHasDk = kGradients != Gradients::dv,
                 kHasDv = kGradients != Gradients::dk;
  using Rows = HeadTile<kWidth>;
  constexpr int kOperandBytes = kQueries * Rows::kRowBytes, kColumnBytes = kQueries * 4,
                kStageBytes = 2 * kOperandBytes + 3 * kColumnBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionSizes& z = p.z;
  const int num_keys = blockDim.x / 32 * kRows, rows = static_cast<int>(z.rows), kv_rows = static_cast<int>(z.kv_rows);
  const uint32_t k = shared_address(shared), v = k + num_keys * Rows::kRowBytes;
  unsigned char* const ring = shared + 2 * num_keys * Rows::kRowBytes;

  const int kv_head = blockIdx.x, group = z.heads / z.kv_heads, b = blockIdx.y;
  const int key = blockIdx.z * num_keys, key_end = min(key + num_keys, kv_rows);  // the longest first
  const int64_t base = b * z.rows;
  const int begin = static_cast<int>(max(key - z.shift, int64_t{0})) / kQueries * kQueries,
            end = static_cast<int>(seen_end(z, b, min(begin, rows), key_end));
  const int tiles = end > begin ? (end - begin + kQueries - 1) / kQueries : 0, steps = tiles * group;

  const auto load = [&](int h, int row, int stage) {
    unsigned char* const stage_memory = ring + stage * kStageBytes;
    const uint32_t to = shared_address(stage_memory), columns = to + 2 * kOperandBytes;
    Rows::copy(to, p.q.of(base, h), row, rows, kQueries);
    Rows::copy(to + kOperandBytes, p.dout.of(base, h), row, rows, kQueries);
    const int i = threadIdx.x;
    if (i < kQueries) {
      const bool valid = row + i < rows;
      const int64_t at = (int64_t{b} * z.heads + h) * z.rows + row + i;
      copy_4(columns + 4 * i, p.sums.lse2 + (valid ? at : 0), valid);
      if (kHasDk) copy_4(columns + kColumnBytes + 4 * i, p.sums.delta + (valid ? at : 0), valid);
      if (z.doc_start) copy_4(columns + 2 * kColumnBytes + 4 * i, z.doc_start + (valid ? base + row + i : 0), valid);
    }
    commit_copies();
  };
  if (steps > 0) Rows::copy(k, p.k.of(b * z.kv_rows, kv_head), key, kv_rows, num_keys);
  if (kHasDk && steps > 0) Rows::copy(v, p.v.of(b * z.kv_rows, kv_head), key, kv_rows, num_keys);
  commit_copies();

  const int in_block = threadIdx.x / 32 * kRows, my_key = key + in_block;
  const Lane left_lane = Rows::left_lane(), right_lane = Rows::right_lane();
  const float scale2 = z.scale * kLog2E;
  Sums<kRows, kHasDk ? kWidth : 16> dk;
  Sums<kRows, kHasDv ? kWidth : 16> dv;
  clear(dk);
  clear(dv);
  Words<kRows, kHolds ? kWidth : 16> k_words, v_words;
  if constexpr (kHolds) {
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      load_matrices<false>(k_words[0][step], Rows::at(k, left_lane, in_block, step));
      load_matrices<false>(v_words[0][step], Rows::at(v, left_lane, in_block, step));
    }
  }
  const auto load_words = [&](uint32_t(&left)[1][4], const auto& words, uint32_t tile, int step) {
    if constexpr (kHolds) {
#pragma unroll
      for (int e = 0; e < 4; ++e) left[0][e] = words[0][step][e];
    } else {
      load_left<kWidth>(left, tile, left_lane, in_block, step);
    }
  };

  int h = kv_head * group, row = begin, stage = 0;
  if (steps > 0) load(h, row, 0);
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // these queries are here, and all are done with the last ones
    const bool more = step + 1 < steps;
    const int my_row = row;
    const unsigned char* const memory = ring + stage * kStageBytes;
    const uint32_t q = shared_address(memory), dout = q + kOperandBytes;
    row += kQueries;
    if (row >= end) row = begin, ++h;
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (more && stages > 1) load(h, row, stage);

    const auto* const lse2 = reinterpret_cast<const float*>(memory + 2 * kOperandBytes) + lane_col();
    const float* const delta = lse2 + kQueries;
    const int* const doc_start = reinterpret_cast<const int*>(delta + kQueries);
    const SeenKeys seen = SeenKeys::of(z, b, my_row, min(my_row + kQueries, rows));
    if (seen.some(my_key, kRows)) {
      Sums<kRows, kQueries> s;
      multiply_rows<kWidth>(s, q, right_lane, [&](uint32_t(&left)[1][4], int i) { load_words(left, k_words, k, i); });
      take_exponentials(s, lse2, scale2);
      if (!seen.all(my_key, kRows)) mask(s, z, doc_start, my_key + lane_row(), my_row + lane_col());
      if constexpr (kHasDv) {
        Words<kRows, kQueries> words;
        pack_words(words, s);
        add_product<kWidth>(dv, words, dout, left_lane);
      }
      if constexpr (kHasDk) {
        Sums<kRows, kQueries> dp;
        multiply_rows<kWidth>(dp, dout, right_lane,
                              [&](uint32_t(&left)[1][4], int i) { load_words(left, v_words, v, i); });
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j) {
          const float2 of = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][j][e] *= dp[0][j][e] - (e % 2 == 0 ? of.x : of.y);
        }
        Words<kRows, kQueries> words;
        pack_words(words, s);
        add_product<kWidth>(dk, words, q, left_lane);
      }
    }
    if (more && stages == 1) {
      __syncthreads();
      load(h, row, stage);
    }
  }
  const float scale[1][2] = {{z.scale, z.scale}}, one[1][2] = {{1, 1}};
  const int64_t to = b * z.kv_rows + my_key, kv_end = (b + int64_t{1}) * z.kv_rows;
  if constexpr (kHasDk) p.dk.store(dk, scale, to, kv_end, kv_head);
  if constexpr (kHasDv) p.dv.store(dv, one, to, kv_end, kv_head);
}

}  // namespace

void launch_dkv(Stream& s, const AttentionBwd& a, const BwdParams& p) {
  if (p.z.kv_rows == 0) return;
  with_attention_config(s, AttentionPass::dkv, p.z, [&]<int kWidth>(const PortableAttentionConfig& config) {
    const dim3 blocks(p.z.kv_heads, static_cast<unsigned>(a.batch),
                      static_cast<unsigned>(div_ceil(p.z.kv_rows, config.block_rows())));
    if constexpr (kDkvTile<kWidth>.splits_sums) {
      launch_attention(s, "attention_bwd", dkv_kernel<kWidth, Gradients::dk>, blocks, config, p, config.stages);
      launch_attention(s, "attention_bwd", dkv_kernel<kWidth, Gradients::dv>, blocks, config, p, config.stages);
    } else {
      launch_attention(s, "attention_bwd", dkv_kernel<kWidth, Gradients::both>, blocks, config, p, config.stages);
    }
  });
}

}  // namespace moebius::cuda::sm80
