// The products of the kernel that computes dq, dk and dv, for latent attention: queries and keys of 192, values of 128.
//
// dk and dv of a warpgroup take 160 registers, which leaves room for scores of 64 queries and for dp of 32. So dp is
// computed in halves of a tile, and dq in two pieces, one after the other. Products are most of the time here: while one
// warpgroup waits for a half, the other one multiplies.
#pragma once

#include "ops/attention/sm90/attention_fused_bwd.h"

namespace moebius::cuda {

// From dp of the 32 queries of a half, and the probabilities of all 64: packed ds and p of the half.
template <int kHalf, class Columns>
__device__ __forceinline__ void pack_half(uint32_t (&p_words)[16], uint32_t (&ds_words)[8], const float (&p)[32],
                                          const float (&dp)[16], const Columns& columns) {
  const int col = fragment().col;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto delta = *reinterpret_cast<const float2*>(columns.delta + 32 * kHalf + 8 * j + col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = 4 * j + 2 * i, of_p = 16 * kHalf + e;
      ds_words[e / 2] = pack_bf16(p[of_p] * (dp[e] - delta.x), p[of_p + 1] * (dp[e + 1] - delta.y));
      p_words[of_p / 2] = pack_bf16(p[of_p], p[of_p + 1]);
    }
  }
}

template <class Shape>
__device__ void multiply_wide(typename Shape::Shared& shared, __nv_bfloat16* dk_out, __nv_bfloat16* dv_out,
                              const AttentionSizes& z, const FusedWork& w, FusedWalk walk) {
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using Outputs = typename Shape::Outputs;
  constexpr int kWidth = Shape::kWidth, kValues = Shape::kValues, kRows = Shape::kRows;
  static_assert(kRows == 64 && Shape::kPieces == 2);
  const int group = threadIdx.x / kGroupThreads - 1, group_row = group * 64;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int64_t base = int64_t{w.b} * z.kv_rows, first_key_row = base + w.key + group_row, end = base + z.kv_rows;
  if (walk.steps() == 0) {
    store_zeros<kWidth>(dk_out, first_key_row, end, z.kv_heads, w.kv_head);
    return store_zeros<kValues>(dv_out, first_key_row, end, z.kv_heads, w.kv_head);
  }
  const float scale2 = z.scale * kLog2E;
  float dk[kWidth / 2] = {}, dv[kValues / 2] = {}, s[32], dp[16];
  const auto start_scores = [&](int stage) {
    wgmma_fence();
    multiply_rows<Keys, Queries, kWidth>(s, smem_addr(shared.k), group_row, smem_addr(shared.q[stage]));
  };
  const auto start_dp = [&](int stage, int half) {
    const uint32_t v = smem_addr(shared.v), dout = smem_addr(shared.dout[stage]);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kValues / 16; ++step) {
      Wgmma<Major::k, Major::k>::multiply(dp, Values::across(v, group_row, step),
                                          Outputs::across(dout, 32 * half, step), step > 0);
    }
    wgmma_commit();
  };
  // Columns 64 + 32 group on, and 128 group on.
  const auto start_middle = [&](float(&dq)[16], int buffer) {
    start_dq<Keys>(dq, smem_addr(shared.ds[buffer][0][0]), smem_addr(shared.k) + Keys::kBlockBytes + 64 * group);
  };
  const auto start_end = [&](float(&dq)[32], int buffer) {
    start_dq<Keys>(dq, smem_addr(shared.ds[buffer][0][0]), smem_addr(shared.k) + 2 * group * Keys::kBlockBytes);
  };
  Ring<Shape::kDqStages> dq_ring;
  const auto pass = [&](const auto& dq) {
    mbarrier_wait(smem_addr(&shared.dq_empty[group][dq_ring.stage]), dq_ring.parity ^ 1);
    pass_dq<Shape>(shared, group, dq_ring.stage, dq);
    dq_ring.advance();
  };
  Ring<Shape::kStages> ring;
  mbarrier_wait(smem_addr(&shared.keys_full), 0);
  mbarrier_wait(smem_addr(&shared.full[0]), 0);
  start_dp(0, 0);
  start_scores(0);
  for (int step = 0;; walk.next()) {
    const int stage = ring.stage, buffer = step & 1;
    const typename Shape::Columns& columns = shared.columns[stage];
    wgmma_wait<0>();
    hold_registers(s);
    hold_registers(dp);
    probabilities_of(s, columns, scale2, w.key + group_row + fragment().row,
                     static_cast<int>(z.shift) + walk.tile * kRows);
    if (w.key + Shape::kKeys > z.kv_rows) clear_keys_past(s, w.key + group_row + fragment().row, z.kv_rows);
    mbarrier_wait(smem_addr(&shared.ds_empty[buffer]), (step >> 1 & 1) ^ 1);
    uint32_t p_words[16], ds_words[8];
    pack_half<0>(p_words, ds_words, s, dp, columns);
    start_dp(stage, 1);
    const uint32_t ds = smem_addr(shared.ds[buffer][0][group]);
    store_ds<0, 8>(ds, ds_words);
    wgmma_wait<0>();
    hold_registers(dp);
    pack_half<1>(p_words, ds_words, s, dp, columns);
    store_ds<2, 8>(ds, ds_words);
    fence_proxy_async();
    hold_words(p_words);
    named_barrier_sync(1 + group, kGroupThreads);  // ds of the warpgroup's keys is there
    wgmma_fence();
    add_product<Outputs, 4>(dv, p_words, smem_addr(shared.dout[stage]));
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      Wgmma<Major::k, Major::mn>::multiply(dk, Sm90Tile<64, 64>::across(ds, 0, k),
                                           Queries::along(smem_addr(shared.q[stage]), k), true);
    }
    wgmma_commit();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.ds_full[buffer]));
    if (step > 0) mbarrier_wait(smem_addr(&shared.ds_full[buffer ^ 1]), (step - 1) >> 1 & 1);
    // dq of the last step; that of the first one is never read.
    const bool has_dq = step > 0;
    start_middle(dp, buffer ^ 1);
    wgmma_wait<0>();
    hold_registers(dp);
    hold_registers(dk);
    hold_registers(dv);
    hold_words(p_words);
    __syncwarp();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.empty[stage]));
    start_end(s, buffer ^ 1);
    if (has_dq) pass(dp);
    const bool is_last = ++step == walk.steps();
    if (!is_last) {
      ring.advance();
      mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    }
    wgmma_wait<0>();
    hold_registers(s);
    if (is_last) {
      if (has_dq) pass(s);
      break;
    }
    start_dp(ring.stage, 0);
    if (has_dq) {
      __syncwarp();
      if (is_first_lane) mbarrier_arrive(smem_addr(&shared.ds_empty[buffer ^ 1]));
      pass(s);
    }
    start_scores(ring.stage);
  }
  const int last = (walk.steps() - 1) & 1;
  mbarrier_wait(smem_addr(&shared.ds_full[last]), (walk.steps() - 1) >> 1 & 1);
  start_middle(dp, last);
  start_end(s, last);
  wgmma_wait<1>();
  hold_registers(dp);
  pass(dp);
  wgmma_wait<0>();
  hold_registers(s);
  pass(s);
  const float scale[2] = {z.scale, z.scale}, one[2] = {1, 1};
  store_sums<kWidth>(dk_out, dk, scale, first_key_row, end, z.kv_heads, w.kv_head);
  store_sums<kValues>(dv_out, dv, one, first_key_row, end, z.kv_heads, w.kv_head);
}

}  // namespace moebius::cuda
