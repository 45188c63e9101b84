// Sequence parallelism (arXiv 2205.05198): each tp rank has one of tp equal blocks of the rows of the residual stream.
// Layers that are split over tp all-gather the rows before they compute, and reduce-scatter their outputs. With one
// rank nothing is moved or copied. In shapes T is the rows of a micro-batch, and t = T / tp those of a block.
//
// With MeshShape::tp_overlap some of these exchanges overlap with products that do not depend on them.
#pragma once

#include <memory>

#include "comm/mesh.h"
#include "device/block_limit.h"
#include "model/step.h"

namespace moebius {

// An exchange of rows that overlaps with the work launched before wait(). That work must not read what arrives, or
// write what is sent. On a GPU, persistent kernels launched meanwhile leave the exchange its multiprocessors.
// Exchanges in flight must be waited for in the reverse order of their starts.
class RowsInFlight {
 public:
  RowsInFlight() = default;  // nothing is in flight
  RowsInFlight(Step& step, const Group& group, Pending pending);
  void wait();  // makes later work wait; throws as Pending::wait()

 private:
  std::unique_ptr<Pending> pending_;  // on the heap, since the limit keeps its address
  std::unique_ptr<BlockLimitScope> limit_;
};

class RowBlocks {
 public:
  explicit RowBlocks(const Mesh& mesh)
      : tp_(mesh.group(Axis::tp)), overlaps_(mesh.shape().tp_overlap && tp_.size() > 1) {}
  int64_t num_ranks() const { return tp_.size(); }
  int64_t rank() const { return tp_.rank(); }
  Group& group() const { return tp_; }
  bool overlaps() const { return overlaps_; }  // whether start_gather() and start_sum() overlap with later work

  // Returns the rows of all ranks, [T, D] on the step stack; x itself with one rank.
  Tensor gather(Step& step, Tensor x_tD) const;
  // Computes y = this rank's rows of the sum of x over the ranks, or adds them to y. Nothing stays on the step stack
  // after the call.
  void sum(Step& step, Tensor y_tD, Tensor x_TD, bool accumulate = false) const;

  // The result of gather(), which may be read after arriving.wait().
  struct Gathering {
    Tensor x_TD;
    RowsInFlight arriving;
  };
  [[nodiscard]] Gathering start_gather(Step& step, Tensor x_tD) const;
  // Starts y = this rank's rows of the sum of x over the ranks. Its buffers are on the step stack, in the caller's
  // scope, which must not end before wait(). REQUIRES: overlaps().
  [[nodiscard]] RowsInFlight start_sum(Step& step, Tensor y_tD, Tensor x_TD) const;

 private:
  Group& tp_;
  bool overlaps_;
};

}  // namespace moebius
