#include "model/attention/max_logits.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {

const Tensor* MaxLogits::declare(const std::string& prefix, Layer layer) {
  Layer& added = layers_.emplace_back(std::move(layer));
  const int64_t padded = div_ceil(added.heads, kPadded) * kPadded;
  plan_.declare(added.padded_P, prefix + ".max_logit", {padded}, DType::f32, Life::metrics);
  return &added.padded_P;
}

void MaxLogits::join() {
  if (layers_.empty()) return;
  std::vector<const Tensor*> views;
  for (const Layer& layer : layers_) views.push_back(&layer.padded_P);
  plan_.join(views, MemoryPlan::kAlign);
}

Tensor MaxLogits::all() const {
  if (layers_.empty()) return {};
  Tensor all = layers_.front().padded_P;
  all.shape = {num_padded()};
  return all;
}

int64_t MaxLogits::num_padded() const {
  int64_t numel = 0;
  for (const Layer& layer : layers_) numel += layer.padded_P.numel();
  return numel;
}

void MaxLogits::clear(Stream& s) const {
  if (!layers_.empty()) fill_zero(s, all());
}

}  // namespace moebius
