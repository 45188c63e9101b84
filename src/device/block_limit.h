// A limit on the number of blocks of persistent kernels, which launch one block per multiprocessor and loop over tiles.
// Tests set a low limit, so that each block loops over many tiles of a small shape.
// Products that overlap with an exchange of rows leave it some multiprocessors (model/side_work.h).
// Matrix products have the same bits with any limit; other kernels may add in another order.
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
