#include "parallel/sharding/layer_weights.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"

namespace moebius {

LayerWeights::LayerWeights(ParamTable& params, const std::vector<const GradBucket*>& buckets, MemoryPlan& plan,
                           bool overlap)
    : params_(params), overlap_(overlap), memory_(overlap ? 2 : 1), buffers_(memory_.num_buffers()) {
  for (const GradBucket* bucket : buckets) {
    memory_.add(*bucket, bucket->weight_share.dtype);
    has_shards_.resize(std::max(has_shards_.size(), static_cast<size_t>(bucket->layer) + 1));
  }
  memory_.declare(plan, "layer_weights", Life::comm);
}

void LayerWeights::gather(Stream& s, const ParamSpan& span) {
  if (overlap_) for_layers(params_, span, [&](int layer) { bring(s, layer); });
}

void LayerWeights::ready(Stream& s, const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    bring(s, layer);
    wait(buffer_of(layer));
    if (memory_.of(layer).empty()) return;
    keep_shards(s, layer);
    ++buffer_of(layer).uses;
  });
}

void LayerWeights::release(const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    if (!memory_.of(layer).empty()) --buffer_of(layer).uses;
  });
}

void LayerWeights::changed(Stream& s) {
  leave_buffers();
  set_shards(s, /*are_new=*/false);
}

void LayerWeights::begin_closed(Stream& s, bool first_of_step) {
  leave_buffers();
  set_shards(s, /*are_new=*/!first_of_step);
}

void LayerWeights::end_closed(Stream& s) {
  leave_buffers();
  set_shards(s, /*are_new=*/true);
}

void LayerWeights::leave_buffers() {
  for (Buffer& buffer : buffers_) leave(buffer);
}

// In a capture the host does the same after each replay, which also leaves no layer in the buffers that it wrote.
void LayerWeights::set_shards(Stream& s, bool are_new) {
  has_shards_.assign(has_shards_.size(), are_new);
  if (!s.capture()) return;
  s.capture()->after_replay([this, are_new] {
    leave_buffers();
    has_shards_.assign(has_shards_.size(), are_new);
  });
}

// Copies this rank's shards of a layer out of its buffer, if they are older than the last update. The buffer then has
// weights that came from their owners.
void LayerWeights::keep_shards(Stream& s, int layer) {
  if (has_shards_[static_cast<size_t>(layer)]) return;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    const Tensor& shard = held.bucket->weight_shard;
    const int64_t first = held.bucket->shard_group->rank() * shard.numel();
    if (!shard.empty()) copy(s, shard, memory_.whole(layer, held).rows(first, first + shard.numel()));
  }
  has_shards_[static_cast<size_t>(layer)] = true;
}

void LayerWeights::bring(Stream& s, int layer) {
  Buffer& buffer = buffer_of(layer);
  if (memory_.of(layer).empty() || buffer.layer == layer) return;
  leave(buffer);
  buffer.layer = layer;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    const GradBucket& bucket = *held.bucket;
    const Tensor whole = memory_.whole(layer, held);
    bucket.for_params(whole, [&](size_t i, void* at) { params_.set_weights(i, at, whole.device); });
    const bool from_shards = has_shards_[static_cast<size_t>(layer)] && !bucket.weight_shard.empty();
    Group& group = from_shards ? *bucket.shard_group : *bucket.group;
    const Tensor& mine = from_shards ? bucket.weight_shard : bucket.weight_share;
    if (overlap_)
      buffer.arriving.push_back(group.start_all_gather(s, whole, mine));
    else
      group.all_gather(s, whole, mine);
  }
}

// After a layer's weights have left the buffer, their tensors have no memory, so that nothing reads those of another
// layer by mistake.
void LayerWeights::leave(Buffer& buffer) {
  MOEBIUS_ASSERT(buffer.uses == 0 && "weights of a layer leave their buffer after its release");
  wait(buffer);
  if (buffer.layer < 0) return;
  for (const LayerBuffers::Held& held : memory_.of(buffer.layer))
    for (const size_t i : held.bucket->indices) params_.set_weights(i, nullptr, DeviceKind::null);
  buffer.layer = -1;
}

void LayerWeights::wait(Buffer& buffer) {
  for (Pending& each : buffer.arriving) each.wait();
  buffer.arriving.clear();
}

}  // namespace moebius
