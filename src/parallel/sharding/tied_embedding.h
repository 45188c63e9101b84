// A head that is the embedding, or multi-token prediction, which reads it, on a pipeline: the first stage holds the
// embedding, theirs a copy each, and each computes its share of the one tensor's gradient. Once the shares are summed
// on all, their optimizers do the same to the same numbers; only the first stage's counts in the gradient norm and in
// checkpoints (ParamSpec::tied_copy).
#pragma once

#include "comm/mesh.h"
#include "config/stage_layout.h"
#include "model/model.h"

namespace moebius {

class TiedEmbedding {
 public:
  // There is nothing to do on ranks that hold no copy, and on one stage.
  TiedEmbedding(const Model& model, const Mesh& mesh, const StageLayout& layout);

  // After the last micro-batch, before gradients are reduced over copies of the model. All holders of a copy call it
  // together.
  void sum_gradients(Stream& s, StepStack& stack) const;

 private:
  const Mesh& mesh_;
  const Param* copy_;         // of this rank, null on those that have none
  std::vector<int> holders_;  // pp ranks, by rising rank
};

}  // namespace moebius
