// The rows of the residual stream, of which each tp rank has one of tp equal blocks (sequence
// parallelism, arXiv 2205.05198). Layers that are split over tp gather all rows before they
// compute. Their outputs are summed over the ranks, and each rank keeps its block. With one
// rank nothing is moved or copied.
#pragma once

#include "comm/mesh.h"
#include "model/step.h"

namespace moebius {

class RowBlocks {
 public:
  explicit RowBlocks(const Mesh& mesh) : tp_(mesh.group(Axis::tp)) {}
  int64_t num_ranks() const { return tp_.size(); }
  int64_t rank() const { return tp_.rank(); }
  Group& group() const { return tp_; }

  // The rows of all ranks, on the step stack; x itself with one rank.
  Tensor gather(Step& step, Tensor x_tD) const;
  // y (+)= this rank's rows of the sum over ranks of x. It holds no memory of the stack
  // after the call.
  void sum(Step& step, Tensor y_tD, Tensor x_TD, bool accumulate = false) const;

 private:
  Group& tp_;
};

}  // namespace moebius
