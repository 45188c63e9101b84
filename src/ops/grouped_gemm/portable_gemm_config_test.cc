#include "ops/grouped_gemm/portable_gemm_config.h"

#include <gtest/gtest.h>

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

constexpr int64_t kKiB = 1024;
const GpuLimits kA100 = documented_gpu_limits(8, 0, 108), kRtx3090 = documented_gpu_limits(8, 6, 82),
                kRtx4090 = documented_gpu_limits(8, 9, 128), kH100 = documented_gpu_limits(9, 0, 132),
                kB200 = documented_gpu_limits(10, 0, 148), kRtx5090 = documented_gpu_limits(12, 0, 170);

GroupedGemmDesc rows(int64_t m, int64_t n, int64_t num_experts) {
  return {.num_experts = num_experts, .m = m, .n = n, .k = 2048};
}
GroupedGemmDesc wgrad(int64_t m, int64_t n, int64_t num_experts) {
  return {.num_experts = num_experts, .m = m, .n = n, .k = 4096, .epilogue = GroupedEpilogue::add_f32};
}

TEST(PortableGemmConfig, IsTheDeepestThatFitsTheGpu) {
  for (const GpuLimits& gpu : {kA100, kH100, kB200})
    EXPECT_EQ(choose_portable_config(rows(32768, 2048, 128), gpu), kPortableDeep);
  for (const GpuLimits& gpu : {kRtx3090, kRtx4090, kRtx5090})
    EXPECT_EQ(choose_portable_config(rows(32768, 2048, 128), gpu), kPortableWide);
}

// One block multiplies while the other is in its epilogue, where a multiprocessor has the memory for both.
TEST(PortableGemmConfig, UsesTwoBlocksPerMultiprocessorForLongEpilogues) {
  for (const GpuLimits& gpu : {kH100, kB200}) {
    EXPECT_EQ(choose_portable_config(wgrad(2048, 768, 128), gpu), kPortablePair);
    GroupedGemmDesc up = rows(32768, 2048, 128);
    up.epilogue = GroupedEpilogue::gated_activation;
    EXPECT_EQ(choose_portable_config(up, gpu), kPortablePair);
    EXPECT_LE(2 * (kPortablePair.shared_bytes(kMaxPortableExperts) + 1024), 228 * kKiB);
  }
  EXPECT_EQ(choose_portable_config(wgrad(2048, 768, 128), kA100), kPortableDeep);
  EXPECT_EQ(choose_portable_config(wgrad(2048, 768, 128), kRtx4090), kPortableWide);
}

TEST(PortableGemmConfig, IsSmallWhereTilesAreTooFewForTheGpu) {
  EXPECT_EQ(choose_portable_config(rows(1280, 2560, 1), kA100), kPortableDeep);  // 110 tiles
  EXPECT_EQ(choose_portable_config(rows(1280, 2560, 1), kH100), kPortableSmall);
  EXPECT_EQ(choose_portable_config(rows(100, 256, 512), kRtx3090), kPortableWide);  // a row of each of 100 experts
  EXPECT_EQ(choose_portable_config(rows(40, 256, 512), kRtx3090), kPortableSmall);  // 80 small tiles
  EXPECT_EQ(choose_portable_config(wgrad(2048, 768, 4), kA100), kPortableDeep);     // 192 tiles
  EXPECT_EQ(choose_portable_config(wgrad(2048, 768, 2), kH100), kPortableSmall);
}

TEST(PortableGemmConfig, IsSmallWhereRowsAreNotInWholeChunks) {
  for (const GpuLimits& gpu : {kA100, kRtx3090, kH100}) {
    GroupedGemmDesc up = rows(32768, 2 * 1028, 128);  // gate and up begin at multiples of 4 columns
    EXPECT_NE(choose_portable_config(up, gpu), kPortableSmall);
    up.epilogue = GroupedEpilogue::gated_activation;
    EXPECT_EQ(choose_portable_config(up, gpu), kPortableSmall);
    GroupedGemmDesc deep = rows(32768, 2048, 128);
    deep.k = 2044;
    EXPECT_EQ(choose_portable_config(deep, gpu), kPortableSmall);
    EXPECT_EQ(choose_portable_config(rows(64, 255, 512), gpu), kPortableSmall);
    EXPECT_EQ(choose_portable_config(wgrad(2047, 768, 128), gpu), kPortableSmall);
  }
}

// 8.6, 8.9 and 12.0 hold one small block: 128 small tiles take two rounds of 82 blocks, and 64 wide ones take one.
TEST(PortableGemmConfig, IsWideWhereOneSmallBlockFitsAndOneRoundIsTooFew) {
  EXPECT_EQ(choose_portable_config(rows(64, 256, 512), kRtx3090), kPortableWide);
  EXPECT_EQ(choose_portable_config(rows(42, 256, 512), kRtx3090), kPortableWide);       // 84 small tiles
  EXPECT_EQ(choose_portable_config(rows(41, 256, 512), kRtx3090), kPortableSmall);      // 82
  EXPECT_EQ(choose_portable_config(rows(64, 256, 512), kA100), kPortableSmall);         // two blocks: one round
  EXPECT_EQ(choose_portable_config(rows(32768, 2048, 800), kRtx3090), kPortableSmall);  // no wide block fits
}

// Shared memory of a multiprocessor in KiB, and 1 KiB less for a block.
TEST(PortableGemmConfig, CountsTheBlocksThatFitEachGpu) {
  const auto blocks = [](const PortableGemmConfig& config, const GpuLimits& gpu, int64_t num_experts = 128) {
    return blocks_of_multiprocessor(config, num_experts, gpu);
  };
  EXPECT_EQ(kA100.shared_bytes_per_multiprocessor, 164 * kKiB);
  EXPECT_EQ(kRtx3090.shared_bytes_per_multiprocessor, 100 * kKiB);
  EXPECT_EQ(kRtx4090.shared_bytes_per_multiprocessor, 100 * kKiB);
  EXPECT_EQ(kH100.shared_bytes_per_multiprocessor, 228 * kKiB);
  EXPECT_EQ(kRtx5090.shared_bytes_per_multiprocessor, 100 * kKiB);
  for (const GpuLimits& gpu : {kRtx3090, kRtx4090, kRtx5090}) {
    EXPECT_EQ(blocks(kPortableSmall, gpu), 1);  // 64.5 KiB and 1 KiB: two need 131 KiB
    EXPECT_EQ(blocks(kPortableWide, gpu), 1);
    EXPECT_EQ(blocks(kPortableWide, gpu, 768), 0);
    EXPECT_EQ(blocks(kPortablePair, gpu), 1);
    EXPECT_EQ(blocks(kPortableDeep, gpu), 0);
  }
  EXPECT_EQ(blocks(kPortableSmall, kA100), 2);
  EXPECT_EQ(blocks(kPortablePair, kA100), 1);
  EXPECT_EQ(blocks(kPortableDeep, kA100), 1);
  for (const GpuLimits& gpu : {kH100, kB200}) {
    EXPECT_EQ(blocks(kPortableSmall, gpu), 2);  // three would fit the memory, but not the registers
    EXPECT_EQ(blocks(kPortablePair, gpu, kMaxPortableExperts), 2);
    EXPECT_EQ(blocks(kPortableDeep, gpu), 1);
  }
}

// A chosen config fits as often as is printed, and a pair is only chosen where two blocks fit.
TEST(PortableGemmConfig, IsChosenWithTheBlocksThatFit) {
  for (const GpuLimits& gpu : {kA100, kRtx3090, kRtx4090, kH100, kB200, kRtx5090}) {
    for (const int64_t num_experts : {int64_t{1}, int64_t{128}, int64_t{767}, int64_t{768}, kMaxPortableExperts}) {
      for (const int64_t m : {1, 100, 1000, 40000}) {
        for (const GroupedEpilogue epilogue : {GroupedEpilogue::store, GroupedEpilogue::gated_activation}) {
          GroupedGemmDesc desc = rows(m, 2048, num_experts);
          desc.epilogue = epilogue;
          const PortableGemmConfig config = choose_portable_config(desc, gpu);
          const int64_t fit = blocks_of_multiprocessor(config, num_experts, gpu);
          EXPECT_GE(fit, config == kPortableSmall ? 1 : config.blocks) << to_string(config, fit);
          EXPECT_LE(fit * (config.shared_bytes(num_experts) + 1024), gpu.shared_bytes_per_multiprocessor);
        }
      }
    }
  }
}

// The offsets of the experts are in shared memory too: 768 fit next to the slots of kPortableWide.
TEST(PortableGemmConfig, FitsWithTheOffsetsOfItsExperts) {
  EXPECT_EQ(choose_portable_config(rows(32768, 2048, 767), kRtx4090), kPortableWide);
  EXPECT_EQ(choose_portable_config(rows(32768, 2048, 768), kRtx4090), kPortableSmall);
  for (const GpuLimits& gpu : {kA100, kRtx3090, kRtx4090, kH100, kB200, kRtx5090}) {
    for (const int64_t num_experts : {int64_t{1}, int64_t{767}, int64_t{768}, kMaxPortableExperts}) {
      for (const int64_t m : {1, 40000}) {
        const PortableGemmConfig config = choose_portable_config(rows(m, 2048, num_experts), gpu);
        EXPECT_LE(config.shared_bytes(num_experts), gpu.shared_bytes_per_block) << to_string(config, config.blocks);
      }
    }
  }
}

// A multiprocessor has 64 Ki registers, and a thread may have 255 of them.
TEST(PortableGemmConfig, FitsTheRegisters) {
  for (const PortableGemmConfig& c : {kPortablePair, kPortableDeep, kPortableWide, kPortableSmall})
    EXPECT_LE(c.threads() * c.blocks * 256, 64 << 10) << to_string(c, c.blocks);
}

TEST(PortableGemmConfig, IsPrintedWhole) {
  EXPECT_EQ(to_string(kPortableDeep, 1),
            "mma.sync, tiles 128 x 256 x 64, 3 slots, 256 threads, 1 block a multiprocessor, L2 groups of 8");
  EXPECT_EQ(to_string(kPortableWide, 1),
            "mma.sync, tiles 128 x 256 x 32, 4 slots, 256 threads, 1 block a multiprocessor, L2 groups of 8");
  EXPECT_EQ(to_string(kPortableSmall, 2),
            "mma.sync, tiles 128 x 128 x 32, 4 slots, 128 threads, 2 blocks a multiprocessor, L2 groups of 8");
  EXPECT_EQ(to_string(kPortableSmall, blocks_of_multiprocessor(kPortableSmall, 128, kRtx4090)),
            "mma.sync, tiles 128 x 128 x 32, 4 slots, 128 threads, 1 block a multiprocessor, L2 groups of 8");
}

TEST(PortableGemmConfig, NamesWhatAGpuLacks) {
  EXPECT_EQ(testing::error_of([] {
              choose_portable_config(rows(8, 8, 1), {7, 5, 40, 64 * kKiB, 65 * kKiB});
            }),
            "grouped product 8 x 8 x 2048, 1 experts, bf16, epilogue store: expected 65544 bytes of shared memory for "
            "a block; this GPU has 65536");
}

}  // namespace
}  // namespace moebius
