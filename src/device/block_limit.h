// A limit on the blocks of a kernel that gives each multiprocessor of a GPU one block, which walks
// over tiles.
// Tests allow only a few blocks, so that small shapes make each block walk over many tiles.
// Products beside an exchange of rows leave it some multiprocessors (model/side_work.h).
// The bits of products do not depend on it; other kernels may add in another order.
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

// Sets the limit on the accelerator of s, which must outlive the scope. The destructor
// removes the limit.
class BlockLimitScope {
 public:
  BlockLimitScope(const Stream& s, int blocks) : limit_(s.accelerator().state<BlockLimit>()) { limit_.blocks = blocks; }
  ~BlockLimitScope() { limit_ = {}; }
  BlockLimitScope(const BlockLimitScope&) = delete;

 private:
  BlockLimit& limit_;
};

}  // namespace moebius
