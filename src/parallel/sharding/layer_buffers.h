// Buffers that the layers of a rank use one after the other, for tensors of which the rank keeps only its share. Layer
// i uses buffer i % N. So with two buffers the next layer of a pass, in either direction, has the other buffer.
#pragma once

#include <string>
#include <vector>

#include "parallel/sharding/grad_buckets.h"

namespace moebius {

class LayerBuffers {
 public:
  explicit LayerBuffers(int num_buffers) : buffers_(static_cast<size_t>(num_buffers)) {}
  LayerBuffers(const LayerBuffers&) = delete;

  // Adds a bucket of a layer, whole and in this dtype, to the layer's buffer, after those added before.
  // It must outlive this.
  void add(const GradBucket& bucket, DType dtype);
  // Declares the buffers, each as large as its largest layer, as `name` and the buffer's number; none without layers.
  void declare(MemoryPlan& plan, const std::string& name, Life life);

  struct Held {
    const GradBucket* bucket = nullptr;
    DType dtype = DType::f32;
    int64_t offset = 0;  // bytes, in the buffer
  };
  // The buckets of a layer; none where the layer has no buffer.
  const std::vector<Held>& of(int layer) const;
  size_t buffer_of(int layer) const { return static_cast<size_t>(layer) % buffers_.size(); }
  size_t num_buffers() const { return buffers_.size(); }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  Tensor whole(int layer, const Held& held) const;  // [bucket->numel], once bound
  int64_t bytes(int layer) const;                   // bytes of all buckets of a layer

 private:
  std::vector<Tensor> buffers_;  // u8
  std::vector<std::vector<Held>> layers_;
};

// Returns `bytes` from an offset on, as elements of a dtype.
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
