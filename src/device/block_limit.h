// A limit on the number of blocks of persistent kernels, which launch one block per multiprocessor and loop over tiles.
// Tests set a low limit, so that each block loops over many tiles of a small shape.
// Products that overlap with an exchange of rows leave it some multiprocessors (model/side_work.h,
// model/attention/row_blocks.h).
// Matrix products have the same bits with any limit; other kernels may add in another order.
#pragma once

#include <algorithm>
#include <climits>
#include <functional>
#include <utility>

#include "device/accelerator.h"
#include "device/device.h"

namespace moebius {

struct BlockLimit {
  int blocks = INT_MAX;
  // Waits on the host for the work that has the other multiprocessors; empty: there is none to wait for. Kernels that
  // are timed to choose among them call it first.
  std::function<void()> wait_for_others;
};

inline int limited_blocks(const Stream& s, int blocks) {
  return std::min(blocks, s.accelerator().state<BlockLimit>().blocks);
}

// Sets the limit on the accelerator of s, which must outlive the scope. The destructor
// restores the limit that was set before.
class BlockLimitScope {
 public:
  BlockLimitScope(const Stream& s, BlockLimit limit)
      : limit_(s.accelerator().state<BlockLimit>()), before_(std::exchange(limit_, std::move(limit))) {}
  BlockLimitScope(const Stream& s, int blocks) : BlockLimitScope(s, BlockLimit{.blocks = blocks}) {}
  ~BlockLimitScope() { limit_ = std::move(before_); }
  BlockLimitScope(const BlockLimitScope&) = delete;

 private:
  BlockLimit& limit_;
  BlockLimit before_;
};

}  // namespace moebius
