#include "ops/attention/portable_attention_config.h"

#include <gtest/gtest.h>

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

constexpr int64_t kKiB = 1024;
const GpuLimits kA100 = documented_gpu_limits(8, 0, 108), kRtx4090 = documented_gpu_limits(8, 9, 128),
                kH100 = documented_gpu_limits(9, 0, 132);
constexpr AttentionPass kPasses[] = {AttentionPass::fwd, AttentionPass::dq, AttentionPass::dkv};

TEST(PortableAttentionConfig, FitsEveryGpuAtEveryWidth) {
  for (const GpuLimits& gpu : {kA100, kRtx4090, kH100}) {
    for (const AttentionPass pass : kPasses) {
      for (int64_t width = 1; width <= 256; ++width) {
        const PortableAttentionConfig config = choose_portable_attention(pass, width, gpu);
        EXPECT_LE(config.shared_bytes(), gpu.shared_bytes_per_block) << to_string(config);
        EXPECT_GE(config.width, width);
        EXPECT_LE(config.width, std::max<int64_t>(32, 2 * width));
      }
    }
  }
}

// A multiprocessor has 64 Ki registers, and a thread may have 255 of them.
TEST(PortableAttentionConfig, FitsTheRegisters) {
  for (const AttentionPass pass : kPasses) {
    for (const int width : kPortableAttentionWidths) {
      const PortableAttentionTile tile = portable_attention_tile(pass, width);
      EXPECT_LE(tile.max_warps * 32 * tile.blocks * 256, 64 << 10) << width;
    }
  }
}

TEST(PortableAttentionConfig, HasMoreStagesAndWarpsWhereSharedMemoryIsLarger) {
  const auto text = [](AttentionPass pass, int64_t width, const GpuLimits& gpu) {
    return to_string(choose_portable_attention(pass, width, gpu));
  };
  EXPECT_EQ(text(AttentionPass::dkv, 80, kRtx4090),
            "dkv, heads to 96: 128 rows a block, steps of 64, 2 stages, 8 warps");
  EXPECT_EQ(text(AttentionPass::dkv, 80, kA100), "dkv, heads to 96: 64 rows a block, steps of 64, 2 stages, 4 warps");
  EXPECT_EQ(text(AttentionPass::dkv, 256, kH100),
            "dkv, heads to 256: 128 rows a block, steps of 32, 2 stages, 8 warps");
  EXPECT_EQ(text(AttentionPass::dkv, 256, kA100), "dkv, heads to 256: 128 rows a block, steps of 32, 1 stage, 8 warps");
  EXPECT_EQ(text(AttentionPass::dkv, 256, kRtx4090),
            "dkv, heads to 256: 64 rows a block, steps of 32, 1 stage, 4 warps");
  EXPECT_EQ(text(AttentionPass::fwd, 96, kH100), "fwd, heads to 96: 128 rows a block, steps of 64, 1 stage, 4 warps");
  EXPECT_EQ(text(AttentionPass::dq, 1, kA100), "dq, heads to 32: 128 rows a block, steps of 32, 2 stages, 4 warps");
}

// On GPUs with 99 KiB for a block, one block of four warps is on a multiprocessor where there are two elsewhere.
TEST(PortableAttentionConfig, SaysHowManyBlocksAMultiprocessorHolds) {
  const auto blocks = [](AttentionPass pass, int64_t width, const GpuLimits& gpu) {
    return blocks_of_multiprocessor(choose_portable_attention(pass, width, gpu), gpu);
  };
  EXPECT_EQ(blocks(AttentionPass::fwd, 64, kRtx4090), 2);
  EXPECT_EQ(blocks(AttentionPass::dq, 32, kRtx4090), 2);
  for (const int64_t width : {96, 128}) {
    EXPECT_EQ(blocks(AttentionPass::fwd, width, kRtx4090), 1) << width;
    EXPECT_EQ(blocks(AttentionPass::fwd, width, kA100), 2) << width;
  }
  for (const int64_t width : {64, 96, 128}) EXPECT_EQ(blocks(AttentionPass::dq, width, kRtx4090), 1) << width;
  EXPECT_EQ(blocks(AttentionPass::dq, 96, kA100), 2);
  EXPECT_EQ(blocks(AttentionPass::dq, 128, kA100), 1);
  EXPECT_EQ(blocks(AttentionPass::dkv, 80, kA100), 2) << "two blocks of half the warps";
  EXPECT_EQ(portable_attention_text(false, 96, kRtx4090),
            "mma.sync, fwd, heads to 96: 128 rows a block, steps of 64, 1 stage, 4 warps, 1 block a multiprocessor");
  EXPECT_EQ(
      portable_attention_text(true, 80, kA100),
      "mma.sync, dq, heads to 96: 128 rows a block, steps of 32, 2 stages, 4 warps, 2 blocks a multiprocessor; dkv, "
      "heads to 96: 64 rows a block, steps of 64, 2 stages, 4 warps, 2 blocks a multiprocessor");
}

TEST(PortableAttentionConfig, RefusesSequencesOfMoreBlocksThanAGridHas) {
  const PortableAttentionConfig config = choose_portable_attention(AttentionPass::fwd, 200, kRtx4090);
  constexpr int64_t kMax = 65535 * 64;
  EXPECT_EQ(portable_attention_blocks("attention_fwd", config, 65), 2u);
  EXPECT_EQ(portable_attention_blocks("attention_fwd", config, kMax), 65535u);
  EXPECT_EQ(testing::error_of([&] { portable_attention_blocks("attention_fwd", config, kMax + 1); }),
            "attention_fwd: the portable kernels for heads of at most 256 take sequences of at most 4194240 tokens on "
            "this GPU; got 4194241; use a shorter train.seq_len, or raise parallel.cp");
}

TEST(PortableAttentionConfig, IsRefusedWhereSharedMemoryIsTooSmall) {
  EXPECT_EQ(
      testing::error_of([] {
        choose_portable_attention(AttentionPass::fwd, 256, {7, 5, 40, 64 * kKiB, 65 * kKiB});
      }),
      "attention: expected 99328 bytes of shared memory for a block (fwd, heads to 256: 64 rows a block, steps of "
      "64, 1 stage, 4 warps); this GPU has 65536");
}

}  // namespace
}  // namespace moebius
