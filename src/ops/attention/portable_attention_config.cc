#include "ops/attention/portable_attention_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.h"
#include "core/tensor.h"
#include "ops/attention/attention_limits.h"

namespace moebius {
namespace {

constexpr const char* kPassNames[] = {"fwd", "dq", "dkv"};

// Two blocks of four warps are faster than one of eight, whose warps wait for each other.
bool fits_twice(const PortableAttentionConfig& c, const GpuLimits& limits) {
  return c.tile().holds_rows && limits.blocks_together(c.shared_bytes()) >= 2;
}

}  // namespace

std::string to_string(const PortableAttentionConfig& c) {
  return fmt::format("{}, heads to {}: {} rows a block, steps of {}, {} stage{}, {} warps",
                     kPassNames[static_cast<int>(c.pass)], c.width, c.block_rows(), c.tile().step_rows, c.stages,
                     c.stages == 1 ? "" : "s", c.warps);
}

// A kernel is compiled for the registers of tile().blocks blocks of the most warps.
int64_t blocks_of_multiprocessor(const PortableAttentionConfig& c, const GpuLimits& limits) {
  const PortableAttentionTile tile = c.tile();
  return std::min<int64_t>(tile.blocks * tile.max_warps / c.warps, limits.blocks_together(c.shared_bytes()));
}

std::string portable_attention_text(bool is_backward, int64_t width, const GpuLimits& limits) {
  std::string text = "mma.sync";
  for (const AttentionPass pass : {AttentionPass::fwd, AttentionPass::dq, AttentionPass::dkv}) {
    if ((pass != AttentionPass::fwd) != is_backward) continue;
    const PortableAttentionConfig config = choose_portable_attention(pass, width, limits);
    const int64_t blocks = blocks_of_multiprocessor(config, limits);
    text += fmt::format("{} {}, {} block{} a multiprocessor", pass == AttentionPass::dkv ? ";" : ",", to_string(config),
                        blocks, blocks == 1 ? "" : "s");
  }
  return text;
}

unsigned portable_attention_blocks(const char* who, const PortableAttentionConfig& config, int64_t rows) {
  const int64_t blocks = div_ceil(rows, config.block_rows()), most = cuda::kMaxHeadsOrBatch * config.block_rows();
  MOEBIUS_CHECK(usage, rows <= most,
                "{}: the portable kernels for heads of at most {} take sequences of at most {} tokens on this GPU; got "
                "{}; use a shorter train.seq_len, or raise parallel.cp",
                who, config.width, most, rows);
  return static_cast<unsigned>(blocks);
}

PortableAttentionConfig choose_portable_attention(AttentionPass pass, int64_t width, const GpuLimits& limits) {
  const int padded = *std::lower_bound(std::begin(kPortableAttentionWidths), std::end(kPortableAttentionWidths), width);
  PortableAttentionConfig config{.pass = pass, .width = padded, .warps = 4, .stages = 2};
  if (fits_twice(config, limits)) return config;
  for (config.warps = config.tile().max_warps; config.warps >= 4; config.warps /= 2) {
    for (config.stages = pass == AttentionPass::fwd ? 1 : 2; config.stages >= 1; --config.stages) {
      if (config.shared_bytes() <= limits.shared_bytes_per_block) return config;
    }
  }
  config = {.pass = pass, .width = padded, .warps = 4, .stages = 1};
  throw Error(ErrorKind::internal,
              fmt::format("attention: expected {} bytes of shared memory for a block ({}); this GPU has {}",
                          config.shared_bytes(), to_string(config), limits.shared_bytes_per_block));
}

}  // namespace moebius
