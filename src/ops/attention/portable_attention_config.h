// The configurations of the portable attention kernels (sm80/), which use mma.sync on any GPU of compute capability 8.0
// and later. They are plain values and need no CUDA, so the choice is tested on every machine.
#pragma once

#include <string>

#include "device/gpu_limits.h"

namespace moebius {

// In fwd and dq a thread block has queries, and loops over keys. In dkv it has keys, and loops over queries.
enum class AttentionPass : uint8_t { fwd, dq, dkv };

// The head widths that kernels are compiled for. Other heads are padded with zeros to the next width.
inline constexpr int kPortableAttentionWidths[] = {32, 64, 96, 128, 192, 256};

// A kernel is compiled for these. Its sums and scores fill the registers.
struct PortableAttentionTile {
  int warp_rows;     // rows of the block for each warp, 16 or 32
  int step_rows;     // rows of a step of the loop
  int max_warps;     // warps of a block
  int blocks;        // blocks per multiprocessor, by registers
  bool holds_rows;   // the rows of the block are in registers
  bool splits_sums;  // dk and dv are computed by separate blocks
};

constexpr PortableAttentionTile portable_attention_tile(AttentionPass pass, int width) {
  const bool wide = width > 128;
  if (pass == AttentionPass::dkv)
    return {.warp_rows = 16,
            .step_rows = width == 256 ? 32 : 64,
            .max_warps = 8,
            .blocks = 1,
            .holds_rows = width < 128,
            .splits_sums = wide};
  return {.warp_rows = wide ? 16 : 32,
          .step_rows = pass == AttentionPass::fwd ? 64 : 32,
          .max_warps = wide ? 8 : 4,
          .blocks = wide ? 1 : 2,
          .holds_rows = false,
          .splits_sums = false};
}

struct PortableAttentionConfig {
  AttentionPass pass;
  int width;   // one of kPortableAttentionWidths
  int warps;   // warps of a block
  int stages;  // steps in shared memory at a time
  bool operator==(const PortableAttentionConfig&) const = default;

  constexpr PortableAttentionTile tile() const { return portable_attention_tile(pass, width); }
  constexpr int threads() const { return 32 * warps; }
  constexpr int block_rows() const { return warps * tile().warp_rows; }
  // Two operands of each row, and three words of 4 bytes, in the backward pass; the forward pass has one
  // operand of its own.
  constexpr int64_t shared_bytes() const {
    const int operands = pass == AttentionPass::fwd ? 1 : 2;
    return block_rows() * (operands * width * 2 + 4) + int64_t{stages} * tile().step_rows * (2 * width * 2 + 12);
  }
};

// Returns a string such as "dkv, heads to 96: 128 rows a block, steps of 64, 2 stages, 8 warps"
std::string to_string(const PortableAttentionConfig& config);

// Returns how many blocks a multiprocessor of this GPU holds, by registers and by shared memory.
int64_t blocks_of_multiprocessor(const PortableAttentionConfig& config, const GpuLimits& limits);

// Returns the blocks for a sequence of this many rows, which are one dimension of a grid. rows: queries or keys,
// whichever the blocks of the pass have. Throws Error{usage} if a grid cannot have so many. who: the op.
unsigned portable_attention_blocks(const char* who, const PortableAttentionConfig& config, int64_t rows);

// Returns the config of a pass, for the larger of the head widths. REQUIRES: 1 <= width <= 256.
// Throws Error{internal} if none fits: the GPU has less than 98 KiB of shared memory per block.
PortableAttentionConfig choose_portable_attention(AttentionPass pass, int64_t width, const GpuLimits& limits);

// Returns what is chosen for a forward pass, or for a backward pass, and the blocks of a multiprocessor, such as
// "mma.sync, fwd, heads to 96: 128 rows a block, steps of 64, 1 stage, 4 warps, 1 block a multiprocessor". The passes
// of a backward pass have a semicolon between them.
std::string portable_attention_text(bool is_backward, int64_t width, const GpuLimits& limits);

}  // namespace moebius
