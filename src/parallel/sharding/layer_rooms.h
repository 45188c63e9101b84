// Memory that the layers of a rank use one after the other, for tensors of which the rank keeps only its share. Layer i
// uses room i % N. So with two rooms the next layer of a pass, in either direction, has the other room.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding/grad_buckets.h"

namespace moebius {

class LayerRooms {
 public:
  explicit LayerRooms(int num_rooms) : rooms_(static_cast<size_t>(num_rooms)) {}
  LayerRooms(const LayerRooms&) = delete;

  // The bucket of a layer, whole and in this dtype, is in the layer's room after those added before. It outlives this.
  void add(const GradBucket& bucket, DType dtype);
  // Declares the rooms, each as large as its largest layer, as `name` and the room's number. No layers, no rooms.
  void declare(MemoryPlan& plan, const std::string& name, Life life);

  struct Held {
    const GradBucket* bucket = nullptr;
    DType dtype = DType::f32;
    int64_t offset = 0;  // bytes, in the room
  };
  // The buckets of a layer; none where the layer has no room.
  const std::vector<Held>& of(int layer) const;
  size_t room_of(int layer) const { return static_cast<size_t>(layer) % rooms_.size(); }
  size_t num_rooms() const { return rooms_.size(); }
  Tensor whole(int layer, const Held& held) const;  // [bucket->numel], once bound
  int64_t bytes(int layer) const;                   // of all buckets of a layer

 private:
  std::vector<Tensor> rooms_;  // u8
  std::vector<std::vector<Held>> layers_;
};

// `bytes` of memory from an offset on, as elements of a dtype.
Tensor elements_of(const Tensor& bytes, int64_t offset, int64_t numel, DType dtype);

// Calls body(layer) for each layer that has parameters of the span.
template <class Body>
void for_layers(const ParamTable& params, const ParamSpan& span, Body&& body) {
  int last = -1;
  for (size_t i = span.begin; i < span.end; ++i) {
    const int layer = params.all()[i].layer;
    if (layer >= 0 && layer != last) body(layer);
    last = layer;
  }
}

}  // namespace moebius
