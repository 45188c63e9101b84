// Computes dk and dv of bf16 with mma.sync. A block has a tile of keys of one kv head of one sequence, and loops over
// the queries that attend to them, one query head after the other. The rows of its scores are keys. Heads wider than
// 128 leave no registers for both sums, so then a block computes either dk or dv.
#include <type_traits>

#include "ops/attention/sm80/attention_bwd.h"

namespace moebius::cuda::sm80 {
namespace {

enum class Gradients { dk, dv, both };

template <int kWidth>
constexpr PortableAttentionTile kDkvTile = portable_attention_tile(AttentionPass::dkv, kWidth);

// Replaces scores by probabilities. lse2: from the lane's first column on.
template <int kN>
__device__ __forceinline__ void take_exponentials(float (&s)[1][kN][4], const float* lse2, float scale2) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 of = *reinterpret_cast<const float2*>(lse2 + 8 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][j][e] = exp2_approx(s[0][j][e] * scale2 - (e % 2 == 0 ? of.x : of.y));
  }
}

// Replaces probabilities by gradients of scores. delta: from the lane's first column on.
template <int kN>
__device__ __forceinline__ void take_gradients(float (&s)[1][kN][4], const float (&dp)[1][kN][4], const float* delta) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const float2 of = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][j][e] *= dp[0][j][e] - (e % 2 == 0 ? of.x : of.y);
  }
}

// Sets the probabilities of masked keys to 0. The lane's first row is key `key`, its first column query `row`, whose
// document begins at *doc_start.
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

// A block's work: `num_keys` keys from `key` of a kv head, and of each of its query heads the queries
// [begin, end) in steps.
struct Work {
  int kv_head, group, b, key, num_keys, begin, end, steps;
};

template <int kQueries>
__device__ __forceinline__ Work work_of_block(const AttentionSizes& z, int num_keys) {
  Work w{.kv_head = static_cast<int>(blockIdx.x), .group = z.heads / z.kv_heads, .b = static_cast<int>(blockIdx.y)};
  w.key = blockIdx.z * num_keys, w.num_keys = num_keys;  // the longest first
  w.begin = static_cast<int>(max(w.key - z.shift, int64_t{0})) / kQueries * kQueries;
  w.end = static_cast<int>(seen_end(z, w.b, min(int64_t{w.begin}, z.rows), min(int64_t{w.key} + num_keys, z.kv_rows)));
  w.steps = w.end > w.begin ? (w.end - w.begin + kQueries - 1) / kQueries * w.group : 0;
  return w;
}

// A step of queries in shared memory: their rows of q and do, their row sums, and where their documents begin.
template <int kWidth>
struct Step {
  using Rows = HeadTile<kWidth>;
  static constexpr int kQueries = kDkvTile<kWidth>.step_rows, kOperandBytes = kQueries * Rows::kRowBytes,
                       kBytes = 2 * kOperandBytes + 3 * 4 * kQueries;
  unsigned char* memory;

  __device__ __forceinline__ uint32_t q() const { return shared_address(memory); }
  __device__ __forceinline__ uint32_t dout() const { return q() + kOperandBytes; }
  __device__ __forceinline__ float* lse2() const { return reinterpret_cast<float*>(memory + 2 * kOperandBytes); }
  __device__ __forceinline__ float* delta() const { return lse2() + kQueries; }
  __device__ __forceinline__ int* doc_start() const { return reinterpret_cast<int*>(delta() + kQueries); }

  // Returns the keys that these queries attend to. The first query is `row`.
  __device__ __forceinline__ SeenKeys seen(const AttentionSizes& z, int row) const {
    const int end = min(row + kQueries, static_cast<int>(z.rows));
    return SeenKeys::of(z, row, end, z.doc_start ? doc_start()[0] : 0, z.doc_start ? doc_start()[end - 1 - row] : 0);
  }
  // Copies the queries from `row` of head h of sequence b.
  __device__ __forceinline__ void copy(const BwdParams& p, int b, int h, int row) const {
    const int rows = static_cast<int>(p.z.rows), i = threadIdx.x;
    const int64_t base = b * p.z.rows;
    Rows::copy(q(), p.q.of(base, h), row, rows, kQueries);
    Rows::copy(dout(), p.dout.of(base, h), row, rows, kQueries);
    if (i < kQueries) {
      const bool valid = row + i < rows;
      const int64_t at = valid ? (int64_t{b} * p.z.heads + h) * p.z.rows + row + i : 0;
      copy_4(shared_address(lse2() + i), p.sums.lse2 + at, valid);
      copy_4(shared_address(delta() + i), p.sums.delta + at, valid);
      if (p.z.doc_start) copy_4(shared_address(doc_start() + i), p.z.doc_start + (valid ? base + row + i : 0), valid);
    }
    commit_copies();
  }
};

// The 16 keys of a warp, and its sums.
template <int kWidth, Gradients kGradients>
struct WarpKeys {
  static constexpr bool kHolds = kDkvTile<kWidth>.holds_rows, kHasDk = kGradients != Gradients::dv,
                        kHasDv = kGradients != Gradients::dk;
  using Rows = HeadTile<kWidth>;
  using Left = std::conditional_t<kHolds, HeldRows<kWidth>, LeftRows<kWidth, 1>>;
  Left k, v;
  Lane left_lane = Rows::left_lane(), right_lane = Rows::right_lane();
  Sums<16, kHasDk ? kWidth : 16> dk;
  Sums<16, kHasDv ? kWidth : 16> dv;

  // Adds the terms of the queries from `row` to the sums. The warp's first key is `key`.
  __device__ __forceinline__ void add(const Step<kWidth>& step, const AttentionSizes& z, const SeenKeys& seen, int key,
                                      int row) {
    constexpr int kQueries = Step<kWidth>::kQueries;
    Sums<16, kQueries> s;
    multiply_rows<kWidth>(s, k, step.q(), right_lane);
    take_exponentials(s, step.lse2() + lane_col(), z.scale * kLog2E);
    if (!seen.all(key, 16)) mask(s, z, step.doc_start() + lane_col(), key + lane_row(), row + lane_col());
    Words<16, kQueries> words;
    if constexpr (kHasDv) {
      pack_words(words, s);
      add_product<kWidth>(dv, words, step.dout(), left_lane);
    }
    if constexpr (kHasDk) {
      Sums<16, kQueries> dp;
      multiply_rows<kWidth>(dp, v, step.dout(), right_lane);
      take_gradients(s, dp, step.delta() + lane_col());
      pack_words(words, s);
      add_product<kWidth>(dk, words, step.q(), left_lane);
    }
  }
};

template <int kWidth, Gradients kGradients>
__global__ void __launch_bounds__(32 * kDkvTile<kWidth>.max_warps, kDkvTile<kWidth>.blocks)
    dkv_kernel(const __grid_constant__ BwdParams p, int stages) {
  using Warp = WarpKeys<kWidth, kGradients>;
  using Rows = HeadTile<kWidth>;
  constexpr int kQueries = Step<kWidth>::kQueries;
  extern __shared__ __align__(128) unsigned char shared[];
  const AttentionSizes& z = p.z;
  const Work w = work_of_block<kQueries>(z, blockDim.x / 32 * 16);
  const int64_t kv_base = w.b * z.kv_rows;
  const uint32_t k = shared_address(shared), v = k + w.num_keys * Rows::kRowBytes;
  const auto step_of = [&](int stage) {
    return Step<kWidth>{shared + 2 * w.num_keys * Rows::kRowBytes + stage * Step<kWidth>::kBytes};
  };
  if (w.steps > 0) {
    Rows::copy(k, p.k.of(kv_base, w.kv_head), w.key, static_cast<int>(z.kv_rows), w.num_keys);
    if (Warp::kHasDk) Rows::copy(v, p.v.of(kv_base, w.kv_head), w.key, static_cast<int>(z.kv_rows), w.num_keys);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }
  const int in_block = threadIdx.x / 32 * 16, my_key = w.key + in_block;
  Warp mine{.k = typename Warp::Left({k, in_block}), .v = typename Warp::Left({v, in_block})};
  clear(mine.dk);
  clear(mine.dv);

  int h = w.kv_head * w.group, row = w.begin, stage = 0;
  if (w.steps > 0) step_of(0).copy(p, w.b, h, row);
  for (int left = w.steps; left > 0; --left) {
    wait_copies<0>();
    __syncthreads();  // these queries have arrived, and all threads have read the last ones
    const Step<kWidth> step = step_of(stage);
    const int my_row = row;
    row += kQueries;
    if (row >= w.end) row = w.begin, ++h;
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (left > 1 && stages > 1) step_of(stage).copy(p, w.b, h, row);
    const SeenKeys seen = step.seen(z, my_row);
    if (seen.some(my_key, 16)) mine.add(step, z, seen, my_key, my_row);
    if (left > 1 && stages == 1) {
      __syncthreads();
      step_of(stage).copy(p, w.b, h, row);
    }
  }
  const float scale[1][2] = {{z.scale, z.scale}}, one[1][2] = {{1, 1}};
  if constexpr (Warp::kHasDk) p.dk.store(mine.dk, scale, kv_base + my_key, kv_base + z.kv_rows, w.kv_head);
  if constexpr (Warp::kHasDv) p.dv.store(mine.dv, one, kv_base + my_key, kv_base + z.kv_rows, w.kv_head);
}

}  // namespace

void launch_dkv(Stream& s, const AttentionBwd& a, const BwdParams& p) {
  if (p.z.kv_rows == 0) return;
  with_attention_config(s, AttentionPass::dkv, p.z, [&]<int kWidth>(const PortableAttentionConfig& config) {
    const dim3 blocks(p.z.kv_heads, static_cast<unsigned>(a.batch),
                      portable_attention_blocks("attention_bwd", config, p.z.kv_rows));
    if constexpr (kDkvTile<kWidth>.splits_sums) {
      launch_attention(s, "attention_bwd", dkv_kernel<kWidth, Gradients::dk>, blocks, config, p, config.stages);
      launch_attention(s, "attention_bwd", dkv_kernel<kWidth, Gradients::dv>, blocks, config, p, config.stages);
    } else {
      launch_attention(s, "attention_bwd", dkv_kernel<kWidth, Gradients::both>, blocks, config, p, config.stages);
    }
  });
}

}  // namespace moebius::cuda::sm80
