// The products of the kernel that computes dq, dk and dv, for latent attention: queries and keys of 192, values of 128.
//
// dk and dv of a warpgroup use 160 registers; the others hold scores of 64 queries and dp of 32. So dp is
// computed in halves of a tile, and dq in two pieces, one after the other. Products are most of the time here: while
// one warpgroup waits for a half, the other one multiplies.
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
__device__ void multiply_wide(typename Shape::Shared& shared, const FusedOutputs& out, const FusedSlice& f,
                              const AttentionSizes& z) {
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Queries = typename Shape::Queries;
  using Outputs = typename Shape::Outputs;
  constexpr int kWidth = Shape::kWidth, kValues = Shape::kValues, kRows = Shape::kRows;
  static_assert(kRows == 64 && Shape::kPieces == 2);
  // The same in all lanes, which the compiler cannot know.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads - 1, 0), group_row = group * 64;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const auto release = [&](uint64_t& barrier) {
    if (is_first_lane) mbarrier_arrive(smem_addr(&barrier));
  };
  const float scale2 = z.scale * kLog2E;
  float s[32], dp[16];
  const auto start_scores = [&](int stage) {
    start_across<Keys, Queries, kWidth>(s, smem_addr(shared.k), group_row, smem_addr(shared.q[stage]), 0);
  };
  const auto start_dp = [&](int stage, int half) {
    start_across<Values, Outputs, kValues>(dp, smem_addr(shared.v), group_row, smem_addr(shared.dout[stage]),
                                           32 * half);
  };
  // Columns 64 + 32 group on, and 128 group on.
  const auto start_middle = [&](float(&dq)[16], int buffer) {
    start_dq<Keys>(dq, smem_addr(shared.ds[buffer][0][0]), smem_addr(shared.k) + Keys::kBlockBytes + 64 * group);
  };
  const auto start_end = [&](float(&dq)[32], int buffer) {
    start_dq<Keys>(dq, smem_addr(shared.ds[buffer][0][0]), smem_addr(shared.k) + 2 * group * Keys::kBlockBytes);
  };
  DqHandOver<Shape> to_add{shared, z, group};
  static_assert(Shape::kStages == 2);
  unsigned count = 0;  // steps of all works; tiles of queries and of ds alternate between two places
  Ring<2> works;
  Ring<1> keys_ring;
  for (;; works.advance()) {
    mbarrier_wait(smem_addr(&shared.work_full[works.stage]), works.parity);
    const FusedWork& w = shared.work[works.stage];
    if (w.block < 0) return;
    const int key = w.key, finish_end = w.finish_end;
    FusedWalk walk = walk_of(w, f);
    // Hands over one piece of dq, or writes it.
    const auto give = [&](unsigned step, const auto& dq, const FusedWalk& of, int piece) {
      const unsigned use = 2 * step + piece;
      if (of.tile < finish_end) return to_add.finish(use, dq, out.dq, w, of, piece);
      to_add.wait_for_place(use);
      to_add.pass(use, dq);
    };
    int steps = walk.steps();
    float dk[kWidth / 2] = {}, dv[kValues / 2] = {};
    if (steps > 0) {
      mbarrier_wait(smem_addr(&shared.values_full), keys_ring.parity);
      mbarrier_wait(smem_addr(&shared.keys_full), keys_ring.parity);
      keys_ring.advance();
      mbarrier_wait(smem_addr(&shared.full[count & 1]), count >> 1 & 1);
      start_dp(count & 1, 0);
      start_scores(count & 1);
      for (bool has_dq = false;; has_dq = true, walk.next()) {
        const int place = count & 1;
        const typename Shape::Columns& columns = shared.columns[place];
        wgmma_wait<0>();
        hold_registers(s);
        hold_registers(dp);
        probabilities_of(s, columns, scale2, key + group_row + fragment().row,
                         static_cast<int>(z.shift) + walk.tile * kRows);
        if (key + Shape::kKeys > z.kv_rows) clear_keys_past(s, key + group_row + fragment().row, z.kv_rows);
        mbarrier_wait(smem_addr(&shared.ds_empty[place]), (count >> 1 & 1) ^ 1);
        uint32_t p_words[16], ds_words[8];
        pack_half<0>(p_words, ds_words, s, dp, columns);
        start_dp(place, 1);
        const uint32_t ds = smem_addr(shared.ds[place][0][group]);
        store_ds<0, 8>(ds, ds_words);
        wgmma_wait<0>();
        hold_registers(dp);
        pack_half<1>(p_words, ds_words, s, dp, columns);
        store_ds<2, 8>(ds, ds_words);
        fence_proxy_async();
        hold_words(p_words);
        named_barrier_sync(1 + group, kGroupThreads);  // ds of the warpgroup's keys is there
        wgmma_fence();
        add_product<Outputs, 4>(dv, p_words, smem_addr(shared.dout[place]));
        const Operand<Major::k> ds_rows(ds);
        const Operand<Major::mn> queries(smem_addr(shared.q[place]), Queries::kBlockBytes);
#pragma unroll
        for (int k = 0; k < kRows / 16; ++k)
          Wgmma<Major::k, Major::mn>::multiply(dk, ds_rows.at(32 * k), queries.at(2048 * k), true);
        wgmma_commit();
        release(shared.ds_full[place]);
        if (has_dq) mbarrier_wait(smem_addr(&shared.ds_full[place ^ 1]), (count - 1) >> 1 & 1);
        // dq of the last step; that of the first one is never read.
        start_middle(dp, place ^ 1);
        ++count;
        wgmma_wait<0>();
        hold_registers(dp);
        hold_registers(dk);
        hold_registers(dv);
        hold_words(p_words);
        __syncwarp();
        release(shared.empty[place]);
        start_end(s, place ^ 1);
        FusedWalk last = walk;
        last.back();
        if (has_dq) give(count - 2, dp, last, 0);
        const bool is_last = --steps == 0;
        if (!is_last) mbarrier_wait(smem_addr(&shared.full[count & 1]), count >> 1 & 1);
        wgmma_wait<0>();
        hold_registers(s);
        if (is_last) {
          __syncwarp();
          release(shared.values_empty);
          if (has_dq) {
            release(shared.ds_empty[place ^ 1]);
            give(count - 2, s, last, 1);
          }
          break;
        }
        start_dp(count & 1, 0);
        if (has_dq) {
          __syncwarp();
          release(shared.ds_empty[place ^ 1]);
          give(count - 2, s, last, 1);
        }
        start_scores(count & 1);
      }
      const int last = (count - 1) & 1;
      mbarrier_wait(smem_addr(&shared.ds_full[last]), (count - 1) >> 1 & 1);
      start_middle(dp, last);
      start_end(s, last);
      wgmma_wait<1>();
      hold_registers(dp);
      give(count - 1, dp, walk, 0);
      wgmma_wait<0>();
      hold_registers(s);
      __syncwarp();
      release(shared.keys_empty);
      release(shared.ds_empty[last]);
      give(count - 1, s, walk, 1);
    }
    const int64_t row = w.key + group_row, rows = z.kv_rows - row,
                  at = (w.b * z.kv_rows + row) * z.kv_heads + w.kv_head, stride = z.kv_heads;
    store_chunks(out.dk + at * kWidth, stride * kWidth, rows, dk, z.scale);
    store_chunks(out.dv + at * kValues, stride * kValues, rows, dv, 1.0f);
    __syncwarp();
    release(shared.work_empty[works.stage]);
  }
}

}  // namespace moebius::cuda
