#include "parallel/sharding/tied_embedding.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {

TiedEmbedding::TiedEmbedding(const Model& model, const Mesh& mesh, const StageLayout& layout)
    : mesh_(mesh), copy_(model.tied_elsewhere()), holders_{0} {
  const int last = static_cast<int>(mesh.shape().pp) - 1;
  const bool apart = layout.mtp_is_apart(), mtp = model.num_mtp_depths() > 0;
  if (apart && mtp) holders_.push_back(last - 1);
  if (model.spec().tie_word_embeddings || (mtp && !apart)) holders_.push_back(last);
}

// All ranks get the same bits: they add the same values in rank order, and a sum of two does not
// depend on the order.
void TiedEmbedding::sum_gradients(Stream& s, StepStack& stack) const {
  if (!copy_ || !copy_->has_grad) return;
  StackScope scope(stack);
  Group& pp = mesh_.group(Axis::pp_back);
  std::vector<Tensor> parts_VD;
  std::vector<Pending> receives;
  for (const int rank : holders_) {
    const bool mine = rank == pp.rank();
    parts_VD.push_back(mine ? copy_->dw : stack.alloc(copy_->dw.shape, DType::f32));
    if (!mine) receives.push_back(pp.recv(s, parts_VD.back(), rank));
  }
  std::vector<Pending> sends;
  for (const int rank : holders_)
    if (rank != pp.rank()) sends.push_back(pp.send(s, copy_->dw, rank));
  for (std::vector<Pending>* pending : {&sends, &receives})
    for (Pending& each : *pending) each.wait();
  // With three ranks, the last one adds the other two first.
  const bool third = holders_.size() == 3 && holders_[2] == pp.rank();
  if (third) add(s, parts_VD[0], parts_VD[1]);
  for (size_t i = 0; i < (third ? 1 : parts_VD.size()); ++i)
    if (holders_[i] != pp.rank()) add(s, copy_->dw, parts_VD[i]);
}

}  // namespace moebius
