#include "parallel/sharding/layer_weights.h"

namespace moebius {

LayerWeights::LayerWeights(ParamTable& params, const std::vector<const GradBucket*>& buckets, MemoryPlan& plan,
                           bool overlap)
    : params_(params), overlap_(overlap), memory_(overlap ? 2 : 1), buffers_(memory_.num_buffers()) {
  for (const GradBucket* bucket : buckets) memory_.add(*bucket, bucket->weight_share.dtype);
  memory_.declare(plan, "layer_weights", Life::comm);
}

void LayerWeights::gather(Stream& s, const ParamSpan& span) {
  if (overlap_) for_layers(params_, span, [&](int layer) { bring(s, layer); });
}

void LayerWeights::ready(Stream& s, const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    bring(s, layer);
    wait(buffer_of(layer));
    if (!memory_.of(layer).empty()) ++buffer_of(layer).uses;
  });
}

void LayerWeights::release(const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    if (!memory_.of(layer).empty()) --buffer_of(layer).uses;
  });
}

void LayerWeights::changed() {
  for (Buffer& buffer : buffers_) leave(buffer);
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
    if (overlap_)
      buffer.arriving.push_back(bucket.group->start_all_gather(s, whole, bucket.weight_share));
    else
      bucket.group->all_gather(s, whole, bucket.weight_share);
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
