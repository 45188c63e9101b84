#include "ops/attention/attention_slices.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace moebius {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Expects that the slices have each query tile of each kv head once, in order, and that no slice
// needs more than it may.
void expect_covers(const DsSizes& z, const DsPlan& plan, int64_t max_ds_bytes) {
  std::set<std::tuple<int64_t, int64_t, int64_t>> seen;
  for (const DsSlice& s : plan.slices) {
    ASSERT_GT(s.sequences * s.kv_heads * s.query_tiles, 0);
    const int64_t tiles = z.tiles_before(s.query_tile + s.query_tiles) - z.tiles_before(s.query_tile);
    const int64_t bytes = s.sequences * s.kv_heads * (z.heads / z.kv_heads) * tiles * kDsTileBytes;
    EXPECT_LE(bytes, plan.ds_bytes);
    for (int64_t b = s.sequence; b < s.sequence + s.sequences; ++b)
      for (int64_t g = s.kv_head; g < s.kv_head + s.kv_heads; ++g)
        for (int64_t t = s.query_tile; t < s.query_tile + s.query_tiles; ++t)
          EXPECT_TRUE(seen.emplace(b, g, t).second) << b << " " << g << " " << t;
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), z.batch * z.kv_heads * z.num_tiles());
  EXPECT_LE(plan.ds_bytes, max_ds_bytes);
}

TEST(AttentionSlices, TilesOfAWindowAreABand) {
  const DsSizes causal{1, 300, 1, 1, 64, 64}, window{1, 300, 1, 1, 64, 64, 65};
  EXPECT_EQ(causal.num_tiles(), 5);
  EXPECT_EQ(causal.tiles_before(5), 1 + 2 + 3 + 4 + 5);
  EXPECT_EQ(window.band(), 2);
  EXPECT_EQ(window.tiles_before(5), 1 + 2 + 2 + 2 + 2);
}

TEST(AttentionSlices, QueriesAreNotCutIfWholeHeadsFit) {
  const DsSizes qwen{8, 4096, 32, 4, 128, 128}, latent{8, 4096, 128, 128, 192, 128};
  for (const DsSizes& z : {qwen, latent}) {
    const DsPlan plan = ds_plan(z, 1280 * kMiB);
    EXPECT_FALSE(plan.cuts_queries);
    EXPECT_EQ(plan.bytes(), plan.ds_bytes);
    expect_covers(z, plan, 1280 * kMiB);
  }
}

TEST(AttentionSlices, QueriesOfLongSequencesAreCut) {
  for (const int64_t rows : {8192, 32768, 131072, 262144, 100001}) {
    for (const DsSizes& z : {DsSizes{1, rows, 32, 4, 128, 128}, DsSizes{2, rows, 64, 8, 64, 64}}) {
      const DsPlan plan = ds_plan(z, 1280 * kMiB);
      EXPECT_TRUE(plan.cuts_queries);
      expect_covers(z, plan, 1280 * kMiB);
      EXPECT_LT(plan.bytes(), 1700 * kMiB);
      int64_t last_end = 0;
      for (const DsSlice& s : plan.slices) {
        EXPECT_EQ(s.query_tile, s.query_tile == 0 ? 0 : last_end) << "slices of the same heads follow each other";
        EXPECT_EQ(s.query_tile % dq_tiles_of_block(z.width), 0);
        last_end = s.query_tile + s.query_tiles;
      }
    }
  }
}

TEST(AttentionSlices, OneKernelTakesWholeKvGroups) {
  // 8 query heads x 4096 rows x 128 columns of f32 are 16 MiB.
  const FusedPlan all = fused_plan({8, 4096, 32, 4, 128, 128}, 512 * kMiB, 1280 * kMiB);
  EXPECT_EQ(all.groups_of_slice, 32);
  EXPECT_EQ(all.wave, 8);  // of 32 blocks of keys
  EXPECT_EQ(all.dq_bytes, 512 * kMiB);
  EXPECT_EQ(all.counter_bytes, (32 * 8 * 64 * 2 + 1) * 4 + 252);
  // 5 sequences do not fit; slices have one size.
  const FusedPlan cut = fused_plan({5, 8192, 32, 4, 128, 128}, 512 * kMiB, 1280 * kMiB);
  EXPECT_EQ(cut.groups_of_slice, 10);
  // At least one group, if that may be.
  const DsSizes long_one{1, 262144, 32, 4, 128, 128};
  EXPECT_EQ(fused_plan(long_one, 512 * kMiB, 1280 * kMiB).groups_of_slice, 1);
  EXPECT_EQ(fused_plan(long_one, 512 * kMiB, 1280 * kMiB).dq_bytes, 1024 * kMiB);
  EXPECT_EQ(fused_plan(long_one, 512 * kMiB, 1000 * kMiB).groups_of_slice, 0);
  EXPECT_EQ(fused_plan({1, 0, 32, 4, 128, 128}, 512 * kMiB, 1280 * kMiB).bytes(), 0);
}

TEST(AttentionSlices, WavesOfTheOneKernelFollowTheShape) {
  const auto wave = [](const DsSizes& z) { return fused_plan(z, 512 * kMiB, 1280 * kMiB).wave; };
  EXPECT_EQ(wave({4, 4096, 32, 4, 128, 128}), 8);
  EXPECT_EQ(wave({1, 4096, 32, 4, 128, 128}), 4) << "it has no more groups";
  EXPECT_EQ(wave({4, 8192, 32, 4, 128, 128}), 4);
  EXPECT_EQ(wave({1, 32768, 32, 4, 128, 128}), 1);
  EXPECT_EQ(wave({1, 131072, 32, 4, 128, 128}), 1);
  EXPECT_EQ(wave({8, 4096, 64, 8, 64, 64}), 8);
  EXPECT_EQ(wave({1, 32768, 64, 8, 64, 64}), 1);
  EXPECT_EQ(wave({8, 4096, 16, 16, 128, 128}), 16);
  EXPECT_EQ(wave({8, 4096, 128, 128, 192, 128}), 8);
  EXPECT_EQ(wave({1, 32768, 128, 128, 192, 128}), 4);
  EXPECT_EQ(wave({8, 4096, 32, 4, 128, 128, 1024}), 2);
  EXPECT_EQ(wave({8, 4096, 32, 4, 128, 128, 0, true}), 2);
}

TEST(AttentionSlices, SetsOfLongCausalGroupsAlternateIfTheCallOwnsTheGpu) {
  const auto set = [](DsSizes z, int64_t multiprocessors = 132) {
    EXPECT_EQ(alternating_set(z, multiprocessors), 0) << "a call that shares the GPU";
    z.owns_gpu = true;
    return alternating_set(z, multiprocessors);
  };
  for (const int64_t rows : {32768, 65536, 98304, 131072}) EXPECT_EQ(set({1, rows, 32, 4, 128, 128}), 132) << rows;
  EXPECT_EQ(set({1, 32768, 64, 8, 64, 64}), 132);
  EXPECT_EQ(set({3, 32768, 4, 1, 128, 128}), 132);
  EXPECT_EQ(set({8, 4096, 32, 4, 128, 128}), 0);
  EXPECT_EQ(set({1, 32768, 12, 4, 128, 128}), 0) << "three heads have few steps";
  EXPECT_EQ(set({1, 32768, 32, 4, 192, 128}), 0) << "not measured";
  EXPECT_EQ(set({1, 32768, 32, 4, 128, 128, 4096}), 0) << "blocks have one length";
  EXPECT_EQ(set({1, 32768, 32, 4, 128, 128, 0, true}), 0);
  EXPECT_EQ(set({1, 32768, 32, 4, 128, 128, 0, false, true}), 0);
  EXPECT_EQ(set({1, 4096, 32, 4, 128, 128}, 16), 0) << "a wave has several groups";
}

TEST(AttentionSlices, AlternatingSetsAreEvenAndTheLastIsNearlyFull) {
  const auto alternates = [](int64_t blocks, int64_t multiprocessors = 132) {
    DsSizes z{1, blocks * 128, 32, 4, 128, 128};
    z.owns_gpu = true;
    return alternating_set(z, multiprocessors) > 0;
  };
  for (const int64_t odd : {132, 384, 396, 640, 660}) EXPECT_FALSE(alternates(odd)) << odd;
  for (const int64_t short_last : {133, 200, 220, 253, 480, 496}) EXPECT_FALSE(alternates(short_last)) << short_last;
  for (const int64_t even : {254, 264, 512, 528, 1024}) EXPECT_TRUE(alternates(even)) << even;
  EXPECT_FALSE(alternates(265)) << "a third set";
  // 32768 rows on a GPU of 114 multiprocessors have three sets.
  EXPECT_FALSE(alternates(256, 114));
  EXPECT_TRUE(alternates(224, 114));
}

TEST(AttentionSlices, OneKernelHasWholeTiles) {
  // Tiles of heads of 64 have 128 rows, so 4097 rows have 33.
  const FusedPlan narrow = fused_plan({1, 4097, 8, 1, 64, 64}, 512 * kMiB, 1280 * kMiB);
  EXPECT_EQ(narrow.dq_bytes, 8 * 33 * 128 * 64 * 4);
  EXPECT_EQ(narrow.counter_bytes, (8 * 33 * 2 + 1) * 4 + 188);
  const FusedPlan latent = fused_plan({8, 4096, 128, 128, 192, 128}, 512 * kMiB, 1280 * kMiB);
  EXPECT_EQ(latent.groups_of_slice, 147);  // 3 MiB each; 1024 in 7 slices
  EXPECT_EQ(latent.dq_bytes, 147 * 3 * kMiB);
}

TEST(AttentionSlices, BackwardPathIsChosenByTheShape) {
  using enum AttentionBwdPath;
  EXPECT_EQ(bwd_path({8, 4096, 32, 4, 128, 128}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 32, 4, 128, 128, 1024}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 32, 4, 128, 128, 512}), kept_ds);
  EXPECT_EQ(bwd_path({8, 4096, 64, 8, 64, 64}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 64, 8, 64, 64, 0, true}), recomputed);
  EXPECT_EQ(bwd_path({8, 4097, 64, 8, 64, 64, 0, true}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 64, 8, 64, 64, 1024, true}), one_kernel);
  EXPECT_EQ(bwd_path({1, 32768, 64, 8, 64, 64, 0, true}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 128, 128, 192, 128}), one_kernel);
  // Sums of one group do not fit, and neither does ds with documents.
  EXPECT_EQ(bwd_path({1, 1 << 20, 32, 4, 128, 128}), kept_ds);
  EXPECT_EQ(bwd_path({1, 1 << 20, 32, 4, 128, 128, 0, true}), recomputed);
  // ds of a part is not kept, and neither is that of documents which do not fit.
  EXPECT_EQ(bwd_path({8, 4096, 32, 4, 128, 128, 0, false, true}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 64, 8, 64, 64, 512, false, true}), one_kernel);
  EXPECT_EQ(bwd_path({8, 4096, 64, 8, 64, 64, 512, true}), one_kernel);
  EXPECT_EQ(bwd_path({1, 1 << 20, 32, 4, 128, 128, 512, false, true}), recomputed) << "no sums fit";
  for (const int64_t width : {64, 128, 192}) {
    const DsSizes z{2, 300, 2, 2, width, std::min<int64_t>(width, 128)};
    for (const AttentionBwdPath path : {one_kernel, kept_ds, recomputed}) EXPECT_TRUE(can_take(z, path));
  }
  EXPECT_FALSE(can_take({1, 1 << 20, 32, 4, 128, 128}, one_kernel));
}

// Operations of products, or as many bytes as are read or written in their time, for a query of a head.
struct Work {
  int64_t sums, recomputed;
};
Work work_of(int64_t width, int64_t v_width, int64_t window) {
  // 128 queries from a multiple of 128 on attend to keys [first, last], and tiles of 64 of them are multiplied.
  const int64_t row = 4096, first = row - window + 1, last = row + 127, keys = (last / 64 - first / 64 + 1) * 64;
  const int64_t bytes_of_row = 2 * (width + v_width), operations_of_pair = 2 * (width + v_width);
  return {.sums = 2 * 4 * width * kOperationsOfByte,
          .recomputed = bytes_of_row * kOperationsOfByte + operations_of_pair * keys};
}

TEST(AttentionSlices, HeadsOf96AndOf256HaveOnePathEach) {
  using enum AttentionBwdPath;
  const DsSizes narrow{8, 4096, 32, 4, 96, 96}, wide{8, 4096, 32, 4, 256, 256},
      wide_window{2, 1000, 8, 4, 256, 256, 200}, long_wide{1, 8192, 32, 4, 256, 256};
  for (const AttentionBwdPath path : {one_kernel, kept_ds, recomputed}) {
    EXPECT_EQ(can_take(narrow, path), path == one_kernel);
    for (const DsSizes& z : {wide, wide_window, long_wide}) EXPECT_EQ(can_take(z, path), path == kept_ds);
  }
  EXPECT_EQ(bwd_path(narrow), one_kernel);
  EXPECT_EQ(bwd_path(wide), kept_ds);
  EXPECT_FALSE(ds_plan(wide, 1280 * kMiB).cuts_queries);
  EXPECT_TRUE(ds_plan(long_wide, 1280 * kMiB).cuts_queries);
  DsSizes part = wide;
  part.is_part = true;
  EXPECT_FALSE(can_take(part, kept_ds));
  EXPECT_EQ(fused_plan(narrow, 512 * kMiB, 1280 * kMiB).dq_bytes, int64_t{8} * 4096 * 32 * 96 * 4);
}

TEST(AttentionSlices, PartsWithWindowsHaveFiveProductsUnlessSevenAreLessWork) {
  using enum AttentionBwdPath;
  const std::pair<int64_t, int64_t> kWidths[] = {{64, 64}, {128, 128}, {192, 128}};
  for (const auto& [width, v_width] : kWidths) {
    int64_t first_window = 0;  // of one kernel
    for (int64_t window = 1; window <= 1024; ++window) {
      const DsSizes part{1, 4096, 8, 4, width, v_width, window, false, true};
      const Work work = work_of(width, v_width, window);
      const bool is_one_kernel = bwd_path(part) == one_kernel;
      EXPECT_EQ(is_one_kernel, work.sums <= work.recomputed) << width << " " << window;
      EXPECT_TRUE(is_one_kernel || bwd_path(part) == recomputed);
      if (is_one_kernel && first_window == 0) first_window = window;
    }
    EXPECT_EQ(first_window, width == 192 ? 194 : 66);
  }
}

TEST(AttentionSlices, ThereAreNoSlicesWithoutRowsOrIfDocumentsDoNotFit) {
  EXPECT_TRUE(ds_plan({1, 32768, 32, 4, 128, 128, 0, true}, 1280 * kMiB).slices.empty());
  EXPECT_TRUE(ds_plan({1, 0, 32, 4, 128, 128}, 1280 * kMiB).slices.empty());
  EXPECT_EQ(ds_plan({1, 2048, 8, 4, 128, 128, 0, true}, 1280 * kMiB).slices.size(), 1u);
}

}  // namespace
}  // namespace moebius
