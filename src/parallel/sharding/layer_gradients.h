// The sums of gradients of layers, of which each rank keeps 1/n (ZeRO-2, arXiv 1910.02054). n is as in layer_weights.h.
//
// The backward pass of a micro-batch computes the gradients of a layer in a buffer (layer_buffers.h). They are then
// summed over the ranks, and each rank stores its share, or adds it to those of the micro-batches before. With overlap
// a sum is in flight while the next layer computes in the other buffer. With sums in bf16 the buffer and the shares are
// in bf16: f32 gradients are rounded into the buffer at the end of a layer's pass (ParamTable::sum_gradients).
//
// So a gradient is the sum over micro-batches of sums over ranks. Whole gradients are the sum over ranks of sums over
// micro-batches. With one micro-batch of a rank in a step the two are the same numbers in the same order. With
// several they differ by rounding: the order of whole gradients needs n partial sums of each share, which are as large
// as whole gradients.
//
// With optimizer.offload_grad shares in bf16 are in host memory. One is copied to staging memory of the device while
// its layer computes, gets the sum there, and is copied back while other layers compute.
#pragma once

#include <memory>
#include <vector>

#include "device/side_copies.h"

#include "parallel/sharding/layer_buffers.h"

namespace moebius {

class LayerGradients {
 public:
  // buckets: those with shards_gradients(); they outlive this. Declares one buffer of Life::layer_grad, or with overlap
  // two and memory of Life::comm for arriving data. With sums in bf16 all of it is of Life::comm, since layers reuse
  // Life::layer_grad for their f32 gradients.
  LayerGradients(ParamTable& params, const std::vector<GradBucket>& buckets, MemoryPlan& plan, bool overlap);
  LayerGradients(const LayerGradients&) = delete;

  // These act on the layers of a span, as ParamResidency says. overlap: the sums may be in flight until finish().
  void begin(Stream& s, const ParamSpan& span, bool first_of_step);
  void ready(Stream& s, const ParamSpan& span, bool overlap);
  // Waits until all sums have arrived and were added to the shares, also to those on the host.
  void finish(Stream& s);

 private:
  struct Buffer {
    int layer = -1;  // the layer whose gradients are there; -1: none
    bool first_of_step = true;
    std::vector<Pending> sums;
    Tensor staging;  // u8, for the layer's shares that are on the host
  };
  Buffer& buffer_of(int layer) { return buffers_[memory_.buffer_of(layer)]; }
  void enter(Buffer& buffer, int layer);
  void start_sums(Stream& s, Buffer& buffer);
  void finish_sums(Stream& s, Buffer& buffer);
  void add_to_shares(Stream& s, const Buffer& buffer);
  Tensor own_rows(const Buffer& buffer, const LayerBuffers::Held& held) const;
  void declare_staging(MemoryPlan& plan);
  void fetch_shares(Stream& s, const Buffer& buffer);  // starts the copies of shares that are on the host
  // Returns the shares of the buffer's layer on the device, by bucket, and the copies of those that are on the host.
  struct Shares {
    std::vector<Tensor> on_device;
    std::vector<SideCopies::Copy> copies;
  };
  Shares shares_of(const Buffer& buffer) const;
  int slot_of(const Buffer& buffer) const { return static_cast<int>(&buffer - buffers_.data()); }

  ParamTable& params_;
  LayerBuffers memory_;
  std::vector<Buffer> buffers_;
  Tensor arrived_;                      // u8, as large as the largest buffer
  std::unique_ptr<SideCopies> copies_;  // null: no share is on the host, or nothing has run yet
  bool any_on_host_ = false;
};

}  // namespace moebius
