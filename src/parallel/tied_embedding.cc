#include "parallel/tied_embedding.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {

TiedEmbedding::TiedEmbedding(const Model& model, const Mesh& mesh) : mesh_(mesh), copy_(model.tied_elsewhere()) {
  other_ = mesh.place().pp == 0 ? static_cast<int>(mesh.shape().pp) - 1 : 0;
}

// Both ends add the same two numbers: the same bits.
void TiedEmbedding::sum_gradients(Stream& s, StepStack& stack) const {
  if (!copy_ || !copy_->has_grad) return;
  StackScope scope(stack);
  const Tensor arrived_VD = stack.take(copy_->dw.shape, DType::f32);
  Pending receive = mesh_.group(Axis::pp_back).recv(s, arrived_VD, other_);
  mesh_.group(Axis::pp_back).send(s, copy_->dw, other_).wait();
  receive.wait();
  add(s, copy_->dw, arrived_VD);
}

}  // namespace moebius
