#include "parallel/sharding/layer_gradients.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"

namespace moebius {

LayerGradients::LayerGradients(ParamTable& params, const std::vector<GradBucket>& buckets, MemoryPlan& plan,
                               bool overlap)
    : params_(params), memory_(overlap ? 2 : 1), buffers_(memory_.num_buffers()) {
  int64_t most = 0;
  bool any_apart = false;
  for (const GradBucket& bucket : buckets) {
    if (!bucket.shards_gradients()) continue;
    memory_.add(bucket, bucket.gradient_share.dtype);
    most = std::max(most, memory_.bytes(bucket.layer));
    any_apart = any_apart || bucket.params.front()->sums_apart();
  }
  memory_.declare(plan, "layer_gradients", any_apart ? Life::comm : Life::layer_grad);
  if (overlap && most > 0) plan.declare(arrived_, "layer_gradients_arrived", {most}, DType::u8, Life::comm);
}

void LayerGradients::begin(Stream& s, const ParamSpan& span, bool first_of_step) {
  for_layers(params_, span, [&](int layer) {
    if (memory_.of(layer).empty()) return;
    Buffer& buffer = buffer_of(layer);
    finish(s, buffer);
    enter(buffer, layer);
    buffer.first_of_step = first_of_step;
    for (size_t i = span.begin; i < span.end; ++i) {
      const Param& p = params_.all()[i];
      if (p.layer == layer && p.shards_gradient() && !p.sums_apart() && !p.spec.grad_stored_first) fill_zero(s, p.dw);
    }
  });
}

// After a layer's gradients have left the buffer, their tensors have no memory, so that nothing reads those of another
// layer by mistake.
void LayerGradients::enter(Buffer& buffer, int layer) {
  if (buffer.layer >= 0 && buffer.layer != layer) {
    for (const LayerBuffers::Held& held : memory_.of(buffer.layer))
      for (const size_t i : held.bucket->indices) params_.set_gradient(i, nullptr, DeviceKind::null);
  }
  buffer.layer = layer;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    const Tensor whole = memory_.whole(layer, held);
    held.bucket->for_params(whole, [&](size_t i, void* at) { params_.set_gradient(i, at, whole.device); });
  }
}

void LayerGradients::ready(Stream& s, const ParamSpan& span, bool overlap) {
  for_layers(params_, span, [&](int layer) {
    if (memory_.of(layer).empty()) return;
    Buffer& buffer = buffer_of(layer);
    MOEBIUS_ASSERT(buffer.layer == layer && "begin_gradient comes before grad_ready");
    if (overlap && !arrived_.empty()) return start_sums(s, buffer);
    for (const LayerBuffers::Held& held : memory_.of(layer)) {
      held.bucket->group->reduce_scatter_sum(s, own_rows(buffer, held), memory_.whole(layer, held));
      add_to_share(s, buffer, held);
    }
  });
}

// Only one layer's sums are in flight at a time, since all layers share the memory for arriving data.
void LayerGradients::start_sums(Stream& s, Buffer& buffer) {
  finish(s);
  for (const LayerBuffers::Held& held : memory_.of(buffer.layer)) {
    const Tensor arrived = elements_of(arrived_, held.offset, held.bucket->numel, held.dtype);
    buffer.sums.push_back(held.bucket->group->start_reduce_scatter_sum(s, own_rows(buffer, held),
                                                                       memory_.whole(buffer.layer, held), arrived));
  }
}

void LayerGradients::finish(Stream& s) {
  for (Buffer& buffer : buffers_) finish(s, buffer);
}

void LayerGradients::finish(Stream& s, Buffer& buffer) {
  if (buffer.sums.empty()) return;
  for (Pending& sum : buffer.sums) sum.wait();
  buffer.sums.clear();
  for (const LayerBuffers::Held& held : memory_.of(buffer.layer)) add_to_share(s, buffer, held);
}

void LayerGradients::add_to_share(Stream& s, const Buffer& buffer, const LayerBuffers::Held& held) const {
  const Tensor& share = held.bucket->gradient_share;
  buffer.first_of_step ? copy(s, share, own_rows(buffer, held)) : add(s, share, own_rows(buffer, held));
}

Tensor LayerGradients::own_rows(const Buffer& buffer, const LayerBuffers::Held& held) const {
  return memory_.whole(buffer.layer, held).rows(held.bucket->own.begin, held.bucket->own.end());
}

}  // namespace moebius
