// The products of the kernel that computes dq, dk and dv, for heads of 64, 96 and 128.
#pragma once

#include "ops/attention/sm90/attention_fused_bwd.h"

namespace moebius::cuda {

template <class Shape>
__device__ void multiply_narrow(typename Shape::Shared& shared, const FusedOutputs& out, const FusedSlice& f,
                                const AttentionSizes& z) {
  using Keys = typename Shape::Keys;
  using Queries = typename Shape::Queries;
  constexpr int kWidth = Shape::kWidth, kRows = Shape::kRows, kTiles = kRows / 64, kHeld = Shape::kHeld;
  // Scores and dp of 128 queries leave no registers for packed probabilities.
  constexpr bool kPacksLate = kRows == 128;
  // The same in all lanes, which the compiler cannot know.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads - 1, 0), group_row = group * 64;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const auto release = [&](uint64_t& barrier) {
    if (is_first_lane) mbarrier_arrive(smem_addr(&barrier));
  };
  const float scale2 = z.scale * kLog2E;
  float s[kRows / 2], dp[kRows / 2];
  uint32_t key_words[std::max(1, 4 * kHeld)];
  const auto start_scores = [&](int stage) {
    start_across<Keys, Queries, kWidth, kHeld>(s, smem_addr(shared.k), group_row, smem_addr(shared.q[stage]), 0,
                                               key_words);
  };
  const auto start_dp = [&](int stage) {
    start_across<Keys, Queries, kWidth>(dp, smem_addr(shared.v), group_row, smem_addr(shared.dout[stage]), 0);
  };
  constexpr int kDq = Shape::piece_columns(0) / 2;
  const DqPart mine = Shape::part(group, 0);
  const uint32_t dq_keys = smem_addr(shared.k) + mine.column / 64 * Keys::kBlockBytes + mine.column % 64 * 2;
  const auto start_half = [&](float(&dq)[kDq], int buffer) {
    start_dq<Keys>(dq, smem_addr(shared.ds[buffer][mine.row / 64][0]), dq_keys);
  };
  DqHandOver<Shape> to_add{shared, z, group};
  // The warpgroups take turns to start products: so those of one run while the other computes exponentials.
  const auto take_turn = [&] { named_barrier_sync(1 + group, kFusedConsumers); };
  const auto pass_turn = [&] { named_barrier_arrive(2 - group, kFusedConsumers); };
  static_assert(Shape::kStages == 2);
  unsigned count = 0;  // steps of all works; tiles of queries and of ds alternate between two places
  Ring<2> works;
  Ring<1> keys_ring;
  if (group == 1) pass_turn();  // the first one of the other
  for (;; works.advance()) {
    mbarrier_wait(smem_addr(&shared.work_full[works.stage]), works.parity);
    const FusedWork& w = shared.work[works.stage];
    if (w.block < 0) break;
    const int key = w.key, finish_end = w.finish_end;
    FusedWalk walk = walk_of(w, f);
    // Hands dq over, or writes it.
    const auto give = [&](unsigned step, const float(&dq)[kDq], const FusedWalk& of) {
      if (of.tile < finish_end) return to_add.finish(step, dq, out.dq, w, of, 0);
      to_add.wait_for_place(step);
      to_add.pass(step, dq);
    };
    int steps = walk.steps();
    float dk[kWidth / 2] = {}, dv[kWidth / 2] = {};
    if (steps > 0) {
      mbarrier_wait(smem_addr(&shared.values_full), keys_ring.parity);
      mbarrier_wait(smem_addr(&shared.keys_full), keys_ring.parity);
      keys_ring.advance();
      if constexpr (kHeld > 0) {
        load_words<Keys, kHeld>(key_words, smem_addr(shared.k), group_row);
        hold_words(key_words);
      }
      mbarrier_wait(smem_addr(&shared.full[count & 1]), count >> 1 & 1);
      take_turn();
      start_scores(count & 1);
      start_dp(count & 1);
      pass_turn();
      for (bool has_dq = false;; has_dq = true, walk.next()) {
        const int place = count & 1;
        const typename Shape::Columns& columns = shared.columns[place];
        wgmma_wait<1>();
        hold_registers(s);
        probabilities_of(s, columns, scale2, key + group_row + fragment().row,
                         static_cast<int>(z.shift) + walk.tile * kRows);
        if (key + Shape::kKeys > z.kv_rows) clear_keys_past(s, key + group_row + fragment().row, z.kv_rows);
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
        mbarrier_wait(smem_addr(&shared.ds_empty[place]), (count >> 1 & 1) ^ 1);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          store_ds<0, 16>(smem_addr(shared.ds[place][tile][group]), ds_words + 16 * tile);
        fence_proxy_async();
        take_turn();
        if constexpr (kPacksLate) hold_words(p_words);
        hold_words(ds_words);
        wgmma_fence();
        add_product<Queries, kRows / 16>(dv, p_words, smem_addr(shared.dout[place]));
        add_product<Queries, kRows / 16>(dk, ds_words, smem_addr(shared.q[place]));
        __syncwarp();
        release(shared.ds_full[place]);
        if (has_dq) mbarrier_wait(smem_addr(&shared.ds_full[place ^ 1]), (count - 1) >> 1 & 1);
        float dq[kDq];
        // The last step has its own code: otherwise ptxas does not see which products have ended where the scores of
        // the next step begin before dq has ended, and lets all products wait for each other.
        if (steps == 1) {
          start_half(dq, place ^ 1);
          wgmma_wait<0>();
          hold_registers(dq);
          hold_registers(dk);
          hold_registers(dv);
          __syncwarp();
          release(shared.empty[place]);
          release(shared.values_empty);
          ++count;
          if (has_dq) {
            release(shared.ds_empty[place ^ 1]);
            FusedWalk last = walk;
            last.back();
            give(count - 2, dq, last);
          }
          break;
        }
        start_half(dq, place ^ 1);  // of the last step; of the first one never read
        --steps;
        ++count;
        FusedWalk last = walk;
        last.back();
        const bool finishes = last.tile < finish_end;
        mbarrier_wait(smem_addr(&shared.full[count & 1]), count >> 1 & 1);
        wgmma_wait<1>();  // dk and dv; the scores follow dq without a gap
        hold_registers(dk);
        hold_registers(dv);
        hold_words(p_words);
        hold_words(ds_words);
        start_scores(count & 1);
        __syncwarp();
        release(shared.empty[place]);
        wgmma_wait<1>();
        hold_registers(dq);
        __syncwarp();
        if (has_dq && !finishes) to_add.wait_for_place(count - 2);
        if (has_dq) {
          release(shared.ds_empty[place ^ 1]);
          if (finishes)
            to_add.finish(count - 2, dq, out.dq, w, last, 0);
          else
            to_add.pass(count - 2, dq);
        }
        start_dp(count & 1);
        pass_turn();
      }
      pass_turn();
      const int last = (count - 1) & 1;
      mbarrier_wait(smem_addr(&shared.ds_full[last]), (count - 1) >> 1 & 1);
      float dq[kDq];
      start_half(dq, last);
      wgmma_wait<0>();
      hold_registers(dq);
      __syncwarp();
      release(shared.keys_empty);
      release(shared.ds_empty[last]);
      give(count - 1, dq, walk);
    }
    const int64_t row = w.key + group_row, rows = z.kv_rows - row, stride = int64_t{z.kv_heads} * kWidth,
                  at = ((w.b * z.kv_rows + row) * z.kv_heads + w.kv_head) * kWidth;
    store_chunks(out.dk + at, stride, rows, dk, z.scale);
    store_chunks(out.dv + at, stride, rows, dv, 1.0f);
    __syncwarp();
    release(shared.work_empty[works.stage]);
  }
  if (group == 0) take_turn();  // the last one that the other passed
}

}  // namespace moebius::cuda
