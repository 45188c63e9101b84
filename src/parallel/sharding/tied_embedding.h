// The embedding on a pipeline, when the head is tied to it or multi-token prediction reads it. The
// first stage holds the embedding and the other two stages a copy each; each computes its share of
// the gradient. The shares are summed on all of them, and then their optimizers apply the same
// update to the same numbers. Only the first stage's embedding counts in the gradient norm and in
// checkpoints (ParamSpec::tied_copy).
#pragma once

#include "comm/mesh.h"
#include "config/stage_layout.h"
#include "model/model.h"

namespace moebius {

class TiedEmbedding {
 public:
  // On a rank that holds no copy, and with one stage, it does nothing.
  TiedEmbedding(const Model& model, const Mesh& mesh, const StageLayout& layout);

  // Called after the last micro-batch and before gradients are reduced over data-parallel ranks, by
  // all holders of a copy together.
  void sum_gradients(Stream& s, StepStack& stack) const;

 private:
  const Mesh& mesh_;
  const Param* copy_;         // this rank's copy; null where it has none
  std::vector<int> holders_;  // pp ranks, ascending
};

}  // namespace moebius
