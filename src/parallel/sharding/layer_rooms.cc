#include "parallel/sharding/layer_rooms.h"

#include <algorithm>

namespace moebius {

void LayerRooms::add(const GradBucket& bucket, DType dtype) {
  const auto layer = static_cast<size_t>(bucket.layer);
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  layers_[layer].push_back({.bucket = &bucket, .dtype = dtype, .offset = bytes(bucket.layer)});
}

const std::vector<LayerRooms::Held>& LayerRooms::of(int layer) const {
  static const std::vector<Held> kNone;
  return static_cast<size_t>(layer) < layers_.size() ? layers_[static_cast<size_t>(layer)] : kNone;
}

int64_t LayerRooms::bytes(int layer) const {
  const std::vector<Held>& all = of(layer);
  return all.empty() ? 0 : all.back().offset + bytes_of(all.back().dtype, all.back().bucket->numel);
}

void LayerRooms::declare(MemoryPlan& plan, const std::string& name, Life life) {
  std::vector<int64_t> most(rooms_.size());
  for (int layer = 0; layer < std::ssize(layers_); ++layer)
    most[room_of(layer)] = std::max(most[room_of(layer)], bytes(layer));
  for (size_t i = 0; i < rooms_.size(); ++i)
    if (most[i] > 0) plan.declare(rooms_[i], fmt::format("{}{}", name, i), {most[i]}, DType::u8, life);
}

Tensor LayerRooms::whole(int layer, const Held& held) const {
  return elements_of(rooms_[room_of(layer)], held.offset, held.bucket->numel, held.dtype);
}

Tensor elements_of(const Tensor& bytes, int64_t offset, int64_t numel, DType dtype) {
  MOEBIUS_ASSERT(offset + bytes_of(dtype, numel) <= bytes.num_bytes());
  return {.data = bytes.data ? static_cast<std::byte*>(bytes.data) + offset : nullptr,
          .shape = {numel},
          .dtype = dtype,
          .device = bytes.device};
}

}  // namespace moebius
