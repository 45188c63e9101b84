#include "parallel/sharding/layer_weights.h"

namespace moebius {

LayerWeights::LayerWeights(ParamTable& params, const std::vector<const GradBucket*>& buckets, MemoryPlan& plan,
                           bool overlap)
    : params_(params), overlap_(overlap), memory_(overlap ? 2 : 1), rooms_(memory_.num_rooms()) {
  for (const GradBucket* bucket : buckets) memory_.add(*bucket, bucket->weight_share.dtype);
  memory_.declare(plan, "layer_weights", Life::comm);
}

void LayerWeights::gather(Stream& s, const ParamSpan& span) {
  if (overlap_) for_layers(params_, span, [&](int layer) { bring(s, layer); });
}

void LayerWeights::ready(Stream& s, const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    bring(s, layer);
    wait(room_of(layer));
    if (!memory_.of(layer).empty()) ++room_of(layer).uses;
  });
}

void LayerWeights::release(const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    if (!memory_.of(layer).empty()) --room_of(layer).uses;
  });
}

void LayerWeights::changed() {
  for (Room& room : rooms_) leave(room);
}

void LayerWeights::bring(Stream& s, int layer) {
  Room& room = room_of(layer);
  if (memory_.of(layer).empty() || room.layer == layer) return;
  leave(room);
  room.layer = layer;
  for (const LayerRooms::Held& held : memory_.of(layer)) {
    const GradBucket& bucket = *held.bucket;
    const Tensor whole = memory_.whole(layer, held);
    bucket.for_params(whole, [&](size_t i, void* at) { params_.set_weights(i, at, whole.device); });
    if (overlap_)
      room.arriving.push_back(bucket.group->start_all_gather(s, whole, bucket.weight_share));
    else
      bucket.group->all_gather(s, whole, bucket.weight_share);
  }
}

// Weights that have left have no memory, so that nobody reads those of another layer.
void LayerWeights::leave(Room& room) {
  MOEBIUS_ASSERT(room.uses == 0 && "weights of a layer leave their room after its release");
  wait(room);
  if (room.layer < 0) return;
  for (const LayerRooms::Held& held : memory_.of(room.layer))
    for (const size_t i : held.bucket->indices) params_.set_weights(i, nullptr, DeviceKind::null);
  room.layer = -1;
}

void LayerWeights::wait(Room& room) {
  for (Pending& each : room.arriving) each.wait();
  room.arriving.clear();
}

}  // namespace moebius
