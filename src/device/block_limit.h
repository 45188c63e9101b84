// Kernels that give each multiprocessor of a GPU one block and let it walk over tiles: how many blocks they may launch.
// Tests allow few, so that small shapes make each block walk over many tiles. What they compute then differs at most by
// the order of its sums.
#pragma once

#include <algorithm>
#include <climits>

#include "device/accelerator.h"
#include "device/device.h"

namespace moebius {

struct BlockLimit {
  int blocks = INT_MAX;
};

inline int limited_blocks(const Stream& s, int blocks) {
  return std::min(blocks, s.accelerator().state<BlockLimit>().blocks);
}

// On the accelerator of s, which outlives it.
class BlockLimitScope {
 public:
  BlockLimitScope(const Stream& s, int blocks) : limit_(s.accelerator().state<BlockLimit>()) { limit_.blocks = blocks; }
  ~BlockLimitScope() { limit_ = {}; }
  BlockLimitScope(const BlockLimitScope&) = delete;

 private:
  BlockLimit& limit_;
};

}  // namespace moebius
