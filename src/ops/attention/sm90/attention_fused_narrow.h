// The products of the kernel that computes dq, dk and dv, for heads of 64 and of 128.
#pragma once

#include "ops/attention/sm90/attention_fused_bwd.h"

namespace moebius::cuda {

template <class Shape>
__device__ void multiply_narrow(typename Shape::Shared& shared, __nv_bfloat16* dk_out, __nv_bfloat16* dv_out,
                                const AttentionSizes& z, const FusedWork& w, FusedWalk walk) {
  using Keys = typename Shape::Keys;
  using Queries = typename Shape::Queries;
  constexpr int kWidth = Shape::kWidth, kRows = Shape::kRows, kTiles = kRows / 64;
  // Scores and dp of 128 queries leave no registers for packed probabilities beside them.
  constexpr bool kPacksLate = kRows == 128;
  const int group = threadIdx.x / kGroupThreads - 1, group_row = group * 64;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int64_t base = int64_t{w.b} * z.kv_rows, first_key_row = base + w.key + group_row, end = base + z.kv_rows;
  if (walk.steps() == 0) {
    store_zeros<kWidth>(dk_out, first_key_row, end, z.kv_heads, w.kv_head);
    return store_zeros<kWidth>(dv_out, first_key_row, end, z.kv_heads, w.kv_head);
  }
  const float scale2 = z.scale * kLog2E;
  float dk[kWidth / 2] = {}, dv[kWidth / 2] = {}, s[kRows / 2], dp[kRows / 2];
  const auto start_scores = [&](int stage) {
    wgmma_fence();
    multiply_rows<Keys, Queries, kWidth>(s, smem_addr(shared.k), group_row, smem_addr(shared.q[stage]));
  };
  const auto start_dp = [&](int stage) {
    wgmma_fence();
    multiply_rows<Keys, Queries, kWidth>(dp, smem_addr(shared.v), group_row, smem_addr(shared.dout[stage]));
  };
  constexpr int kDq = Shape::piece_columns(0) / 2;
  const DqPart mine = Shape::part(group, 0);
  const uint32_t dq_keys = smem_addr(shared.k) + mine.column / 64 * Keys::kBlockBytes + mine.column % 64 * 2;
  const auto start_half = [&](float(&dq)[kDq], int buffer) {
    start_dq<Keys>(dq, smem_addr(shared.ds[buffer][mine.row / 64][0]), dq_keys);
  };
  Ring<Shape::kDqStages> dq_ring;
  const auto wait_for_place = [&] {
    mbarrier_wait(smem_addr(&shared.dq_empty[group][dq_ring.stage]), dq_ring.parity ^ 1);
  };
  const auto pass = [&](const float(&dq)[kDq]) {
    pass_dq<Shape>(shared, group, dq_ring.stage, dq);
    dq_ring.advance();
  };
  // The warpgroups take turns to start products: so those of one run while the other computes exponentials.
  const auto take_turn = [&] { named_barrier_sync(1 + group, kFusedConsumers); };
  const auto pass_turn = [&] { named_barrier_arrive(2 - group, kFusedConsumers); };
  Ring<Shape::kStages> ring;
  mbarrier_wait(smem_addr(&shared.keys_full), 0);
  mbarrier_wait(smem_addr(&shared.full[0]), 0);
  if (group == 1) pass_turn();  // the first one of the other
  take_turn();
  start_scores(0);
  start_dp(0);
  pass_turn();
  for (int step = 0;; walk.next()) {
    const int stage = ring.stage, buffer = step & 1;
    const typename Shape::Columns& columns = shared.columns[stage];
    wgmma_wait<1>();
    hold_registers(s);
    probabilities_of(s, columns, scale2, w.key + group_row + fragment().row,
                     static_cast<int>(z.shift) + walk.tile * kRows);
    if (w.key + Shape::kKeys > z.kv_rows) clear_keys_past(s, w.key + group_row + fragment().row, z.kv_rows);
    uint32_t p_words[kRows / 4], ds_words[kRows / 4];
    if constexpr (!kPacksLate) {
      pack(p_words, s);
      hold_words(p_words);
    }
    wgmma_wait<0>();
    hold_registers(dp);
    dscores_of(dp, s, columns);
    if constexpr (kPacksLate) pack(p_words, s);
    pack(ds_words, dp);
    mbarrier_wait(smem_addr(&shared.ds_empty[buffer]), (step >> 1 & 1) ^ 1);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      store_ds<0, 16>(smem_addr(shared.ds[buffer][tile][group]), ds_words + 16 * tile);
    fence_proxy_async();
    take_turn();
    if constexpr (kPacksLate) hold_words(p_words);
    hold_words(ds_words);
    wgmma_fence();
    add_product<Queries, kRows / 16>(dv, p_words, smem_addr(shared.dout[stage]));
    add_product<Queries, kRows / 16>(dk, ds_words, smem_addr(shared.q[stage]));
    __syncwarp();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.ds_full[buffer]));
    if (step > 0) mbarrier_wait(smem_addr(&shared.ds_full[buffer ^ 1]), (step - 1) >> 1 & 1);
    float dq[kDq];
    start_half(dq, buffer ^ 1);  // of the last step; of the first one never read
    const bool has_dq = step > 0;
    if (++step == walk.steps()) {
      wgmma_wait<0>();
      hold_registers(dq);
      hold_registers(dk);
      hold_registers(dv);
      if (has_dq) {
        wait_for_place();
        pass(dq);
      }
      break;
    }
    ring.advance();
    mbarrier_wait(smem_addr(&shared.full[ring.stage]), ring.parity);
    wait_for_place();
    wgmma_wait<0>();
    hold_registers(dq);
    hold_registers(dk);
    hold_registers(dv);
    hold_words(p_words);
    hold_words(ds_words);
    start_scores(ring.stage);
    __syncwarp();
    if (is_first_lane) mbarrier_arrive(smem_addr(&shared.empty[stage]));
    if (has_dq) {
      if (is_first_lane) mbarrier_arrive(smem_addr(&shared.ds_empty[buffer ^ 1]));
      pass(dq);
    }
    start_dp(ring.stage);
    pass_turn();
  }
  if (group == 0) pass_turn();  // the last one of the other
  const int last = (walk.steps() - 1) & 1;
  mbarrier_wait(smem_addr(&shared.ds_full[last]), (walk.steps() - 1) >> 1 & 1);
  float dq[kDq];
  start_half(dq, last);
  wait_for_place();
  wgmma_wait<0>();
  hold_registers(dq);
  pass(dq);
  const float scale[2] = {z.scale, z.scale}, one[2] = {1, 1};
  store_sums<kWidth>(dk_out, dk, scale, first_key_row, end, z.kv_heads, w.kv_head);
  store_sums<kWidth>(dv_out, dv, one, first_key_row, end, z.kv_heads, w.kv_head);
}

}  // namespace moebius::cuda
