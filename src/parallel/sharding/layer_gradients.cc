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
  declare_staging(plan);
}

void LayerGradients::declare_staging(MemoryPlan& plan) {
  std::vector<int64_t> most(buffers_.size());
  for (int layer = 0; layer < memory_.num_layers(); ++layer) {
    int64_t bytes = 0;
    for (const LayerBuffers::Held& held : memory_.of(layer))
      if (held.bucket->gradients_on_host) bytes += held.bucket->gradient_share.num_bytes();
    int64_t& of_slot = most[memory_.buffer_of(layer)];
    of_slot = std::max(of_slot, bytes);
  }
  for (size_t i = 0; i < most.size(); ++i) {
    if (most[i] == 0) continue;
    plan.declare(buffers_[i].staging, fmt::format("staged_gradients{}", i), {most[i]}, DType::u8, Life::comm);
    any_on_host_ = true;
  }
}

void LayerGradients::begin(Stream& s, const ParamSpan& span, bool first_of_step) {
  for_layers(params_, span, [&](int layer) {
    if (memory_.of(layer).empty()) return;
    Buffer& buffer = buffer_of(layer);
    finish_sums(s, buffer);
    enter(buffer, layer);
    buffer.first_of_step = first_of_step;
    fetch_shares(s, buffer);
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
    for (const LayerBuffers::Held& held : memory_.of(layer))
      held.bucket->group->reduce_scatter_sum(s, own_rows(buffer, held), memory_.whole(layer, held));
    add_to_shares(s, buffer);
  });
}

// Only one layer's sums are in flight at a time, since all layers share the memory for arriving data.
void LayerGradients::start_sums(Stream& s, Buffer& buffer) {
  for (Buffer& each : buffers_) finish_sums(s, each);
  for (const LayerBuffers::Held& held : memory_.of(buffer.layer)) {
    const Tensor arrived = elements_of(arrived_, held.offset, held.bucket->numel, held.dtype);
    buffer.sums.push_back(held.bucket->group->start_reduce_scatter_sum(s, own_rows(buffer, held),
                                                                       memory_.whole(buffer.layer, held), arrived));
  }
}

void LayerGradients::finish(Stream& s) {
  for (Buffer& buffer : buffers_) finish_sums(s, buffer);
  if (!copies_) return;
  for (const Buffer& buffer : buffers_) copies_->wait_to_host(s, slot_of(buffer));
}

void LayerGradients::finish_sums(Stream& s, Buffer& buffer) {
  if (buffer.sums.empty()) return;
  for (Pending& sum : buffer.sums) sum.wait();
  buffer.sums.clear();
  add_to_shares(s, buffer);
}

void LayerGradients::add_to_shares(Stream& s, const Buffer& buffer) {
  const std::vector<LayerBuffers::Held>& all = memory_.of(buffer.layer);
  const Shares shares = shares_of(buffer);
  // The staging memory is free for the first sums of a step when those before have left it. Later ones are added there.
  if (copies_ && buffer.first_of_step) copies_->wait_to_host(s, slot_of(buffer));
  if (copies_ && !buffer.first_of_step) copies_->wait_to_device(s, slot_of(buffer));
  for (size_t k = 0; k < all.size(); ++k) {
    const Tensor& share = shares.on_device[k];
    buffer.first_of_step ? copy(s, share, own_rows(buffer, all[k])) : add(s, share, own_rows(buffer, all[k]));
  }
  if (copies_ && !shares.copies.empty()) copies_->to_host(s, slot_of(buffer), shares.copies);
}

void LayerGradients::fetch_shares(Stream& s, const Buffer& buffer) {
  if (!any_on_host_ || s.device() == DeviceKind::null) return;
  if (!copies_) copies_ = SideCopies::make(s);
  if (buffer.first_of_step) return;
  const Shares shares = shares_of(buffer);
  if (!shares.copies.empty()) copies_->to_device(s, slot_of(buffer), shares.copies);
}

LayerGradients::Shares LayerGradients::shares_of(const Buffer& buffer) const {
  Shares shares;
  int64_t offset = 0;
  for (const LayerBuffers::Held& held : memory_.of(buffer.layer)) {
    const Tensor& share = held.bucket->gradient_share;
    if (!held.bucket->gradients_on_host) {
      shares.on_device.push_back(share);
      continue;
    }
    const Tensor staged = elements_of(buffer.staging, offset, share.numel(), share.dtype);
    offset += share.num_bytes();
    shares.copies.push_back({.device = staged.data, .host = share.data, .num_bytes = share.num_bytes()});
    shares.on_device.push_back(staged);
  }
  return shares;
}

Tensor LayerGradients::own_rows(const Buffer& buffer, const LayerBuffers::Held& held) const {
  return memory_.whole(buffer.layer, held).rows(held.bucket->own.begin, held.bucket->own.end());
}

}  // namespace moebius
