// A Sharding divides the update of parameters among the ranks that hold the same parameters. It decides which elements
// a rank owns, and when gradients and weights are communicated. The engine owns it and calls it; an optimizer reads
// only Param::owned.
//
// A step calls, in this order:  run_passes, for each of its passes (model/residency.h); reduce; the
// update of the elements owned; weights_changed.
#pragma once

#include <functional>
#include <memory>

#include "comm/mesh.h"
#include "model/params.h"

namespace moebius {

// The pieces that the communication is cut into, and the time when it runs. Neither changes a bit of a gradient.
struct ShardingSpec {
  // Gradients that are reduced together. They are few enough that the first reduction starts early
  // in the backward pass, and enough that latency does not dominate the messages.
  static constexpr int64_t kBucketNumel = int64_t{1} << 22;

  bool overlap = false;  // overlapped with the passes of the model
  int64_t bucket_numel = kBucketNumel;
  // A parameter whose gradient changes after the backward pass, so that it is reduced in reduce();
  // null: none.
  const Param* held = nullptr;
  // Ranks that hold the same parameters of a layer keep only what they own of its weights (layer_weights.h), and of
  // the sums of its gradients (layer_gradients.h).
  bool shards_weights = false;
  bool shards_gradients = false;
  // The weights of layers that a rank keeps are in host memory, and passes copy them to the device. REQUIRES:
  // shards_weights, if other ranks hold the same weights of layers.
  bool weights_on_host = false;
  bool gradients_on_host = false;  // optimizer.offload_grad: sharded sums in bf16 are in host memory
};

// Passes of a step, for the communication that overlaps with them.
struct StepPasses {
  bool first = true;  // these passes are the first of the step
  // Micro-batches left when these passes end the step: the reduction of a gradient starts after the
  // last of them. 0: more passes follow, nothing is reduced.
  int64_t last_micro_batches = 0;
  // For a CUDA graph. True: the first passes of a step always gather weights, and all
  // communication that passes start ends with them.
  bool closed = false;
};

class Sharding : public ParamResidency {
 public:
  // Returns whether the first and the last passes of a step communicate. Otherwise all its passes
  // are the same work.
  virtual bool overlaps() const = 0;
  // Runs body, which consists of passes of one or more micro-batches of a step. While the
  // stream captures a graph, the changes of state of its replays are registered here.
  virtual void run_passes(Stream& s, const StepPasses& passes, const std::function<void()>& body) = 0;
  // After this the owned elements of every gradient hold the sum over the ranks of its grad_axis;
  // the rest is unspecified.
  virtual void reduce(Stream& s) = 0;
  // Called after the owners have changed their elements of gradients. After this every rank of grad_axis has all
  // elements of the gradients for which `of` is true, and of other gradients in the same buckets. REQUIRES:
  // !shards_gradients.
  virtual void gather_gradients(Stream& s, const std::function<bool(const ParamSpec&)>& of) = 0;
  // The owners have updated their weights, or the masters of weights that are held quantised, which this
  // quantises. The other ranks get them in this call, or with overlap during the next forward pass. They get the
  // sharded weights of a layer whenever a pass comes to it.
  virtual void weights_changed(Stream& s) = 0;
  // After this each rank has the updated weights of all parameters that it keeps whole.
  virtual void wait_for_weights(Stream& s) = 0;
};

// Places the trainable parameters in memory and makes this rank the owner of its share of each:
// call it before the plan is bound. All ranks together make the same calls of what it returns. The
// references, and spec.held, outlive it.
std::unique_ptr<Sharding> make_sharding(ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
                                        const ShardingSpec& spec = {});

}  // namespace moebius
