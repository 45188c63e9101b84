// The weights of layers, of which each rank keeps 1/n (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277). n is the
// number of ranks that hold the same parameters: dp_cp or tp_cp_dp for dense ones, edp for experts. They may be frozen.
//
// A pass gathers the weights of a layer into a buffer (layer_buffers.h) when it comes to the layer. With overlap that
// starts one layer early, in both directions, while the layer before computes in the other buffer. A layer that is
// still in its buffer is not gathered again: the last two at the turn of forward and backward, and the first two in
// the next forward. Weights are sent as their owners hold them, so no bit depends on this.
//
// With parallel.fsdp_shard the first gather of a layer after an update is over all n ranks. It leaves a shard of the
// layer on each rank, so that the other gathers are over shard_group alone, such as the ranks of a node (hpZ of ZeRO++,
// arXiv 2306.10209; hybrid sharding).
//
// With "weights" in memory.offload shares and shards are in host memory. What no other rank has is copied straight
// into the buffer, one layer early like a gather. What is gathered is first copied to staging memory of the device,
// which has this rank's part of two layers. With overlap that starts two layers early, so a gather need not wait
// for it.
#pragma once

#include <memory>
#include <vector>

#include "device/side_copies.h"
#include "parallel/sharding/layer_buffers.h"

namespace moebius {

class LayerWeights {
 public:
  // buckets: GradBuckets::with_sharded_weights(); they outlive this. Declares one buffer of Life::comm,
  // with overlap two, and the same of staging memory if shares that are gathered are on the host.
  LayerWeights(ParamTable& params, const std::vector<const GradBucket*>& buckets, MemoryPlan& plan, bool overlap,
               bool on_host);
  LayerWeights(const LayerWeights&) = delete;

  // These act on the layers of a span, as ParamResidency says. looks_further: the pass will probably need the layer
  // after the span too, so its copy to staging memory starts.
  void gather(Stream& s, const ParamSpan& span, bool looks_further);
  // Throws Error{internal} where another layer in the same buffer is in use.
  void ready(Stream& s, const ParamSpan& span);
  void release(const ParamSpan& span);
  // Called after the owners have changed their shares: the buffers and the shards are out of date.
  void changed(Stream& s);
  // Passes that a CUDA graph may capture begin and end with empty buffers, so that each replay gathers what it reads.
  // The first ones of a step gather from the owners, and all others from shards.
  void begin_closed(Stream& s, bool first_of_step);
  void end_closed(Stream& s);

 private:
  struct Buffer {
    int layer = -1;  // the layer whose weights are in the buffer, or arriving; -1: none
    int uses = 0;
    bool copies = false;  // copies to it may be in flight
    std::vector<Pending> arriving;
  };
  // This rank's part of a layer, on its way from the host to a gather.
  struct Staging {
    Tensor memory;         // u8
    int layer = -1;        // -1: none
    bool copies = false;   // copies to it may be in flight
    bool is_read = false;  // a gather from it may be in flight
  };
  Buffer& buffer_of(int layer) { return buffers_[memory_.buffer_of(layer)]; }
  Staging& staging_of(int layer) { return staging_[memory_.buffer_of(layer)]; }
  bool has(int layer) const { return layer >= 0 && !memory_.of(layer).empty(); }
  bool is_from_shards(int layer, const GradBucket& bucket) const;
  Group& group_of(int layer, const GradBucket& bucket) const;
  const Tensor& part_of(int layer, const GradBucket& bucket) const;  // what this rank gives to a gather
  void bring(Stream& s, int layer);  // starts to gather a layer that is not in its buffer
  void gather_bucket(Stream& s, Buffer& buffer, const LayerBuffers::Held& held, const Tensor& mine);
  void copy_to_buffer(Stream& s, int layer);  // starts the copies of what no other rank has
  void stage(Stream& s, int layer);           // starts the copies of what is gathered
  void declare_staging(MemoryPlan& plan);
  std::vector<Tensor> staged(
      int layer);              // the parts in staging memory, by bucket; empty for those that are not gathered
  void leave(Buffer& buffer);  // takes the weights of the buffer's layer away
  void leave_buffers(Stream& s);
  void forget();                             // the same, where nothing is in flight
  void set_shards(Stream& s, bool are_new);  // of all layers: has_shards_
  void wait(Stream& s, Buffer& buffer);
  void wait(Stream& s, Staging& staging);
  void keep_shards(Stream& s, int layer);
  void prepare(const Stream& s);

  ParamTable& params_;
  bool overlap_, on_host_;
  LayerBuffers memory_;
  std::vector<Buffer> buffers_;
  std::vector<Staging> staging_;
  int last_hint_ = -1;  // the last layer of a gather(): the next one is on the same side of it
  std::unique_ptr<SideCopies> to_buffers_, to_staging_;
  std::vector<bool> has_shards_;  // [layer]: weight_shard of its buckets has the weights of the last update
};

}  // namespace moebius
