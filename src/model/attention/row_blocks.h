// Sequence parallelism (arXiv 2205.05198): each tp rank has one of tp equal blocks of the rows of the residual stream.
// Layers that are split over tp all-gather the rows before they compute, and reduce-scatter their outputs. With one
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

  // Returns the rows of all ranks, on the step stack; x itself with one rank.
  Tensor gather(Step& step, Tensor x_tD) const;
  // y (+)= this rank's rows of the sum of x over the ranks. Nothing stays on the step stack after the call.
  void sum(Step& step, Tensor y_tD, Tensor x_TD, bool accumulate = false) const;

 private:
  Group& tp_;
};

}  // namespace moebius
