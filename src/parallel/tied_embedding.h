// A head that is the embedding, on a pipeline: the first and the last stage hold a copy each, and each computes its
// share of the one tensor's gradient. Once the shares are summed on both, both optimizers do the same to the same
// numbers; only the first stage's copy counts in the gradient norm and in checkpoints (ParamSpec::tied_copy).
#pragma once

#include "comm/mesh.h"
#include "model/model.h"

namespace moebius {

class TiedEmbedding {
 public:
  // There is nothing to do for models that are not tied or on one rank, and on ranks between the first and the last.
  TiedEmbedding(const Model& model, const Mesh& mesh);

  // After the last micro-batch, before gradients are reduced over copies of the model. The first and the last rank of
  // the pipeline call it together.
  void sum_gradients(Stream& s, StepStack& stack) const;

 private:
  const Mesh& mesh_;
  const Param* copy_;  // of this rank, null on those that have none
  int other_;          // pp rank of the other
};

}  // namespace moebius
