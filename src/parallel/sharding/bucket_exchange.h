// The communication of the sharded optimizer. Gradients go to the ranks that own them and are
// summed there; weights come back from their owners. With overlap both run while the model
// computes. The reduction of a bucket of gradients starts when the last micro-batch's backward pass
// has added to it. A forward pass waits for a bucket of weights when it first reads them. Without
// overlap each is one blocking collective. The same numbers are added in the same order either way.
//
// A step calls, in this order:  begin_passes, the passes (model/residency.h), reduce, weights_changed.
#pragma once

#include <array>
#include <vector>

#include "parallel/sharding/grad_buckets.h"

namespace moebius {

// Passes of a step, for the exchange that overlaps with them.
struct StepPasses {
  bool first = true;  // of the step
  // Micro-batches left when these passes end the step: a bucket's reduction starts after the last
  // of them. 0: more passes follow, nothing is reduced.
  int64_t last_micro_batches = 0;
  // For a CUDA graph. True: the first passes of a step gather weights in any case, and all
  // communication that passes start ends with them.
  bool closed = false;
};

class BucketExchange final : public ParamResidency {
 public:
  // The references outlive it. overlap: declares memory for the gradients that arrive, twice the
  // largest bucket, and watches the passes of the model.
  BucketExchange(const GradBuckets& buckets, ParamTable& params, MemoryPlan& plan, bool overlap);
  BucketExchange(const BucketExchange&) = delete;
  ~BucketExchange() override;

  bool overlaps() const { return overlap_; }
  // This parameter's gradient changes after the backward pass, so its bucket is reduced in reduce().
  void hold(const Param& p);
  // Around the passes of one or more micro-batches of a step. When the stream
  // captures a graph, what its replays
  // change here is registered for them.
  void begin_passes(Stream& s, const StepPasses& passes);
  void end_passes(Stream& s, const StepPasses& passes);
  // After this the owned elements of every gradient hold the sum over the axis; the rest is unspecified.
  void reduce(Stream& s);
  // The owners have updated their weights. The other ranks get them in this call, or with overlap
  // during the next forward pass.
  void weights_changed(Stream& s);
  // After this every weight is that of its owner: for code that reads weights outside a pass.
  void settle(Stream& s);

  // gather starts to bring all buckets when the owners have changed their weights. ready waits for
  // the buckets of the span. release does nothing, since every rank keeps all weights. grad_ready
  // starts the reduction of a bucket that is complete.
  void gather(Stream& s, const ParamSpan& span) override;
  void ready(Stream& s, const ParamSpan& span) override;
  void release(Stream& s, const ParamSpan& span) override;
  void grad_ready(Stream& s, const ParamSpan& span) override;

 private:
  static constexpr size_t kInFlight = 2;

  struct State {
    int64_t gradients_left = 0;  // gradients of its parameters that are awaited, over the remaining micro-batches
    bool reduced = false;
    Pending weights;
  };

  bool leaves_early(size_t b) const { return overlap_ && !held_[b]; }
  void start_reduce(Stream& s, size_t b);
  void join_gradients();
  void passes_were_replayed(const StepPasses& passes);
  void start_gather(Stream& s);
  void gather_all(Stream& s);
  Tensor owned(const Tensor& all, const GradBucket& bucket) const {
    return all.rows(bucket.own.begin, bucket.own.end());
  }

  const GradBuckets& buckets_;
  ParamTable& params_;
  bool overlap_;
  std::vector<State> states_;  // per bucket
  std::vector<bool> held_;     // per bucket
  std::array<Tensor, kInFlight> arrived_;
  std::array<Pending, kInFlight> gradients_;
  size_t num_started_ = 0;
  bool weights_are_old_ = false;
};

}  // namespace moebius
