// The communication of the sharded optimizer: gradients go to the ranks that own them and are summed there, weights
// come back from their owners. With overlap both run while the model computes: the reduction of a bucket of gradients
// starts when the last micro-batch's backward pass has added to it, and a forward pass waits for a bucket of weights
// when it first reads them. Without overlap each is one blocking collective. The same numbers are added in the same
// order either way.
//
// A step calls, in this order:  begin_passes, the passes (model/residency.h), reduce, weights_changed.
#pragma once

#include <array>
#include <vector>

#include "parallel/sharding/grad_buckets.h"

namespace moebius {

class BucketExchange final : public ParamResidency {
 public:
  // The references outlive it. overlap: declares memory for the gradients that arrive, twice the largest bucket, and
  // watches the passes of the model.
  BucketExchange(const GradBuckets& buckets, ParamTable& params, MemoryPlan& plan, bool overlap);
  BucketExchange(const BucketExchange&) = delete;
  ~BucketExchange() override;

  bool overlaps() const { return overlap_; }
  // This parameter's gradient changes after the backward pass, so its bucket is reduced in reduce().
  void hold(const Param& p);
  // last_micro_batches: micro-batches left if these passes end the step; with overlap the reduction of a bucket starts
  // after the last of them. 0: more passes follow, nothing is reduced.
  void begin_passes(int64_t last_micro_batches);

  // For passes that are recorded and replayed: join() at their end waits for all that they began. Of a replay, which
  // runs none of this, replayed() says which passes it was.
  void join(Stream& s);
  void replayed(bool gathered, int64_t last_micro_batches);
  // With overlap the next forward pass gathers weights: it is being recorded, or weights_changed() was replayed.
  void expect_gather() { weights_are_old_ = overlap_; }
  // After this the owned elements of every gradient hold the sum over the group; the others are unspecified.
  void reduce(Stream& s);
  // The owners have updated their weights. The others get them now, or with overlap while the next forward pass runs.
  void weights_changed(Stream& s);
  // After this every weight is that of its owner: for code that reads weights outside a pass.
  void settle(Stream& s);

  // gather starts to bring all buckets when the owners have moved their weights; ready waits for those of the span.
  // release does nothing: every rank keeps all weights. grad_ready starts the reduction of a bucket that is complete.
  void gather(Stream& s, const ParamSpan& span) override;
  void ready(Stream& s, const ParamSpan& span) override;
  void release(Stream& s, const ParamSpan& span) override;
  void grad_ready(Stream& s, const ParamSpan& span) override;

 private:
  static constexpr size_t kInFlight = 2;

  struct State {
    int64_t gradients_left = 0;  // of its parameters, over the micro-batches to come; 0: none are awaited
    bool reduced = false;
    Pending weights;
  };

  bool leaves_early(size_t b) const { return overlap_ && !held_[b]; }
  void start_reduce(Stream& s, size_t b);
  void join_gradients();
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
