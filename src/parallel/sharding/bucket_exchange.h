// The sharding of ZeRO-1, and of ZeRO-2 and ZeRO-3 for layers. A rank updates the weights of its share of each bucket
// (parallel/sharding/grad_buckets.h). With ZeRO-1 it keeps all weights and gradients. With ZeRO-2 and ZeRO-3 it keeps
// only its share of those of layers (layer_weights.h, layer_gradients.h).
//
// For what is not sharded: gradients are reduce-scattered to the ranks that own them, and weights are all-gathered from
// their owners. With overlap both run while the model computes. The reduction of a bucket of gradients starts when the
// last micro-batch's backward pass has added to it. A forward pass waits for a bucket of weights when it first reads
// them. Without overlap each is one blocking collective. The same numbers are added in the same order either way.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "parallel/sharding/grad_buckets.h"
#include "parallel/sharding/layer_gradients.h"
#include "parallel/sharding/layer_weights.h"
#include "parallel/sharding/sharding.h"

namespace moebius {

class BucketExchange final : public Sharding {
 public:
  // Arguments are those of make_sharding(). With overlap it declares memory for the gradients that
  // arrive, twice the largest bucket, and watches the passes of the model.
  BucketExchange(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, const ShardingSpec& spec);
  BucketExchange(const BucketExchange&) = delete;
  ~BucketExchange() override;

  bool overlaps() const override { return overlap_; }
  void run_passes(Stream& s, const StepPasses& passes, const std::function<void()>& body) override;
  void reduce(Stream& s) override;
  void gather_gradients(Stream& s, const std::function<bool(const ParamSpec&)>& of) override;
  void weights_changed(Stream& s) override;
  void wait_for_weights(Stream& s) override;

  // gather starts to gather all buckets if the owners have changed their weights. ready waits for
  // the buckets of the span. release does nothing, since every rank keeps all weights. grad_ready
  // starts the reduction of a bucket that is complete. begin_gradient does nothing.
  void gather(Stream& s, const ParamSpan& span) override;
  void ready(Stream& s, const ParamSpan& span) override;
  void release(Stream& s, const ParamSpan& span) override;
  void begin_gradient(Stream& s, const ParamSpan& span, bool first_of_step) override;
  void grad_ready(Stream& s, const ParamSpan& span) override;

 private:
  static constexpr size_t kInFlight = 2;

  struct State {
    int64_t gradients_left = 0;  // gradients of its parameters that are awaited, over the remaining micro-batches
    bool reduced = false;
    Pending weights;
  };

  // Returns whether the calls of passes have any effect.
  bool acts() const { return overlap_ || layer_weights_ || layer_gradients_; }
  void hold(const Param& p);
  void declare_arrived(MemoryPlan& plan);
  void begin_passes(Stream& s, const StepPasses& passes);
  bool leaves_early(size_t b) const { return overlap_ && !held_[b]; }
  void start_reduce(Stream& s, size_t b);
  void join_gradients();
  void passes_were_replayed(const StepPasses& passes);
  void declare_magnitudes(MemoryPlan& plan);
  void quantise_weights(Stream& s);
  void quantise(Stream& s, const GradBucket& bucket);
  void start_gather(Stream& s);
  void gather_all(Stream& s);
  static bool keeps_whole_weights(const GradBucket& bucket) {
    return bucket.group->size() > 1 && !bucket.shards_weights();
  }
  static bool keeps_whole_gradients(const GradBucket& bucket) {
    return bucket.group->size() > 1 && !bucket.shards_gradients();
  }
  Tensor owned(const Tensor& all, const GradBucket& bucket) const {
    return all.rows(bucket.own.begin, bucket.own.end());
  }

  ParamTable& params_;
  GradBuckets buckets_;
  bool overlap_ = false;
  bool runs_passes_ = false;
  std::optional<LayerWeights> layer_weights_;
  std::optional<LayerGradients> layer_gradients_;
  std::vector<State> states_;  // one per bucket
  std::vector<bool> held_;     // one per bucket
  std::array<Tensor, kInFlight> arrived_;
  std::array<Pending, kInFlight> gradients_;
  Tensor magnitudes_;  // i32, for the blocks of the bucket with the most, of each rank; empty: no weights are quantised
  size_t num_started_ = 0;
  bool weights_are_old_ = false;
};

}  // namespace moebius
