#include "parallel/sharding/layer_buffers.h"

#include <algorithm>

namespace moebius {

void LayerBuffers::add(const GradBucket& bucket, DType dtype) {
  const auto layer = static_cast<size_t>(bucket.layer);
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  layers_[layer].push_back({.bucket = &bucket, .dtype = dtype, .offset = bytes(bucket.layer)});
}

const std::vector<LayerBuffers::Held>& LayerBuffers::of(int layer) const {
  static const std::vector<Held> kNone;
  return static_cast<size_t>(layer) < layers_.size() ? layers_[static_cast<size_t>(layer)] : kNone;
}

int64_t LayerBuffers::bytes(int layer) const {
  const std::vector<Held>& all = of(layer);
  return all.empty() ? 0 : all.back().offset + bytes_of(all.back().dtype, all.back().bucket->numel);
}

void LayerBuffers::declare(MemoryPlan& plan, const std::string& name, Life life) {
  std::vector<int64_t> most(buffers_.size());
  for (int layer = 0; layer < std::ssize(layers_); ++layer)
    most[buffer_of(layer)] = std::max(most[buffer_of(layer)], bytes(layer));
  for (size_t i = 0; i < buffers_.size(); ++i)
    if (most[i] > 0) plan.declare(buffers_[i], fmt::format("{}{}", name, i), {most[i]}, DType::u8, life);
}

Tensor LayerBuffers::whole(int layer, const Held& held) const {
  return elements_of(buffers_[buffer_of(layer)], held.offset, held.bucket->numel, held.dtype);
}

Tensor elements_of(const Tensor& bytes, int64_t offset, int64_t numel, DType dtype) {
  MOEBIUS_ASSERT(offset + bytes_of(dtype, numel) <= bytes.num_bytes());
  return {.data = bytes.data ? static_cast<std::byte*>(bytes.data) + offset : nullptr,
          .shape = {numel},
          .dtype = dtype,
          .device = bytes.device};
}

}  // namespace moebius
