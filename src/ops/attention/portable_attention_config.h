// How attention is computed with mma.sync on any GPU of compute capability 8.0 and later, within the
// limits of the GPU at hand: plain values, for which no CUDA is needed. The kernels are in sm80/.
#pragma once

#include <string>

#include "device/gpu_limits.h"

namespace moebius {

// fwd and dq: a block has queries, and walks keys. dkv: a block has keys, and walks queries.
enum class AttentionPass : uint8_t { fwd, dq, dkv };

// The widths that kernels are compiled for. The head of a call is padded to the next one with zeros.
inline constexpr int kPortableAttentionWidths[] = {32, 64, 96, 128, 192, 256};

// A kernel is compiled for these. Its sums and scores fill the registers.
struct PortableAttentionTile {
  int warp_rows;     // rows of the block that a warp has, 16 or 32
  int step_rows;     // rows that are walked at a time
  int max_warps;     // of a block
  int blocks;        // of a multiprocessor, as far as registers go
  bool holds_rows;   // rows of the block are in registers
  bool splits_sums;  // dk and dv have a block each
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
  int warps;   // of a block
  int stages;  // steps in shared memory at a time; the forward pass loads keys and values in turn
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

// "dkv, heads to 96: 128 rows a block, steps of 64, 2 stages, 8 warps"
std::string to_string(const PortableAttentionConfig& config);

// The config of a pass over heads of this width, of which that of values is another. REQUIRES: 1 <= width <= 256.
// Error{internal} where none fits the GPU: one with less than 98 KiB of shared memory for a block.
PortableAttentionConfig choose_portable_attention(AttentionPass pass, int64_t width, const GpuLimits& limits);

}  // namespace moebius
