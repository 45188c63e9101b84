// The weights of layers, of which each rank keeps 1/n (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277). n is the
// number of ranks that hold the same parameters: dp_cp or tp_cp_dp for dense ones, edp for experts. They may be frozen.
//
// A pass gathers the weights of a layer into a buffer (layer_buffers.h) when it comes to the layer. With overlap that
// starts one layer early, in both directions, while the layer before computes in the other buffer. A layer that is still
// in its buffer is not gathered again: the last two at the turn of forward and backward, and the first two in the next
// forward. Weights are sent as their owners hold them, so no bit depends on this.
//
// With parallel.fsdp_shard the first gather of a layer after an update is over all n ranks. It leaves a shard of the
// layer on each rank, so that the other gathers are over shard_group alone, such as the ranks of a node (hpZ of ZeRO++,
// arXiv 2306.10209; hybrid sharding).
#pragma once

#include <vector>

#include "parallel/sharding/layer_buffers.h"

namespace moebius {

class LayerWeights {
 public:
  // buckets: GradBuckets::with_sharded_weights(); they outlive this. Declares one buffer of Life::comm,
  // with overlap two.
  LayerWeights(ParamTable& params, const std::vector<const GradBucket*>& buckets, MemoryPlan& plan, bool overlap);
  LayerWeights(const LayerWeights&) = delete;

  // These act on the layers of a span, as ParamResidency says.
  void gather(Stream& s, const ParamSpan& span);
  // Throws Error{internal} where another layer in the same buffer is in use.
  void ready(Stream& s, const ParamSpan& span);
  void release(const ParamSpan& span);
  // Called after the owners have changed their shares: the buffers and the shards are out of date.
  void changed(Stream& s);
  // Passes that a CUDA graph may capture begin and end with empty buffers, so that each replay gathers what it reads. The
  // first ones of a step gather from the owners, and all others from shards.
  void begin_closed(Stream& s, bool first_of_step);
  void end_closed(Stream& s);

 private:
  struct Buffer {
    int layer = -1;  // the layer whose weights are in the buffer, or arriving; -1: none
    int uses = 0;
    std::vector<Pending> arriving;
  };
  Buffer& buffer_of(int layer) { return buffers_[memory_.buffer_of(layer)]; }
  void bring(Stream& s, int layer);  // starts to gather a layer that is not in its buffer
  void leave(Buffer& buffer);        // takes the weights of the buffer's layer away
  void leave_buffers();
  void set_shards(Stream& s, bool are_new);  // of all layers: has_shards_
  static void wait(Buffer& buffer);
  void keep_shards(Stream& s, int layer);

  ParamTable& params_;
  bool overlap_;
  LayerBuffers memory_;
  std::vector<Buffer> buffers_;
  std::vector<bool> has_shards_;  // [layer]: weight_shard of its buckets has the weights of the last update
};

}  // namespace moebius
