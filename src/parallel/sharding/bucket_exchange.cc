#include "parallel/sharding/bucket_exchange.h"

#include <algorithm>

#include "ops/quantize/quantize_shard.h"

namespace moebius {

std::unique_ptr<Sharding> make_sharding(ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
                                        const ShardingSpec& spec) {
  return std::make_unique<BucketExchange>(params, mesh, plan, spec);
}

BucketExchange::BucketExchange(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, const ShardingSpec& spec)
    : params_(params), buckets_(params, mesh, plan, spec), states_(buckets_.all().size()), held_(states_.size()) {
  const auto any_bucket = [&](const auto& is_so) {
    return std::any_of(buckets_.all().begin(), buckets_.all().end(), is_so);
  };
  const std::vector<const GradBucket*> sharded = buckets_.with_sharded_weights();
  overlap_ = spec.overlap &&
             (!sharded.empty() || any_bucket([](const GradBucket& bucket) { return bucket.group->size() > 1; }));
  if (spec.held) hold(*spec.held);
  declare_magnitudes(plan);
  if (!sharded.empty()) layer_weights_.emplace(params, sharded, plan, overlap_, spec.weights_on_host);
  if (any_bucket([](const GradBucket& bucket) { return bucket.shards_gradients(); }))
    layer_gradients_.emplace(params, buckets_.all(), plan, overlap_);
  if (overlap_) declare_arrived(plan);
  if (acts()) params.set_residency(this);
}

BucketExchange::~BucketExchange() {
  if (acts()) params_.set_residency(nullptr);
}

void BucketExchange::declare_arrived(MemoryPlan& plan) {
  int64_t largest = 0;
  for (const GradBucket& bucket : buckets_.all())
    if (keeps_whole_gradients(bucket)) largest = std::max(largest, bucket.numel);
  if (largest == 0) return;
  for (size_t i = 0; i < kInFlight; ++i)
    plan.declare(arrived_[i], fmt::format("gradients_arrived{}", i), {largest}, DType::f32, Life::comm);
}

void BucketExchange::hold(const Param& p) {
  for (size_t b = 0; b < states_.size(); ++b) {
    const auto& in_bucket = buckets_.all()[b].params;
    if (std::find(in_bucket.begin(), in_bucket.end(), &p) != in_bucket.end()) held_[b] = true;
  }
}

// --- gradients ------------------------------------------------------------------------------------------------------

void BucketExchange::run_passes(Stream& s, const StepPasses& passes, const std::function<void()>& body) {
  begin_passes(s, passes);
  if (passes.closed && layer_weights_) layer_weights_->begin_closed(s, passes.first);
  runs_passes_ = true;
  body();
  runs_passes_ = false;
  if (!passes.closed) return;
  wait_for_weights(s);
  if (layer_weights_) layer_weights_->end_closed(s);
  if (layer_gradients_) layer_gradients_->finish(s);
  join_gradients();
}

void BucketExchange::begin_passes(Stream& s, const StepPasses& passes) {
  for (size_t b = 0; b < states_.size(); ++b) {
    states_[b].gradients_left = leaves_early(b) && !buckets_.all()[b].shards_gradients()
                                    ? passes.last_micro_batches * std::ssize(buckets_.all()[b].params)
                                    : 0;
    states_[b].reduced = false;
  }
  if (passes.closed && passes.first) weights_are_old_ = overlap_;
  if (s.capture()) s.capture()->after_replay([this, passes] { passes_were_replayed(passes); });
}

// A replay repeats the device work of the captured passes; this restores the state that they
// left on the host.
void BucketExchange::passes_were_replayed(const StepPasses& passes) {
  if (passes.first) weights_are_old_ = false;
  for (size_t b = 0; b < states_.size(); ++b) {
    states_[b].reduced = passes.last_micro_batches > 0 && leaves_early(b);
    states_[b].gradients_left = 0;
  }
}

void BucketExchange::join_gradients() {
  for (size_t i = 0; i < kInFlight; ++i) gradients_[(num_started_ + i) % kInFlight].wait();  // the oldest first
}

void BucketExchange::begin_gradient(Stream& s, const ParamSpan& span, bool first_of_step) {
  if (layer_gradients_) layer_gradients_->begin(s, span, first_of_step);
}

void BucketExchange::grad_ready(Stream& s, const ParamSpan& span) {
  if (layer_gradients_) layer_gradients_->ready(s, span, overlap_ && runs_passes_);
  for (size_t i = span.begin; i < span.end; ++i) {
    const int b = buckets_.bucket_of(i);
    if (b < 0 || states_[b].gradients_left <= 0) continue;
    if (--states_[b].gradients_left == 0) start_reduce(s, b);
  }
}

// If the same memory still has one in flight, that is waited for, and summed, first.
void BucketExchange::start_reduce(Stream& s, size_t b) {
  const GradBucket& bucket = buckets_.all()[b];
  states_[b].reduced = true;
  if (bucket.group->size() == 1) return;
  const size_t slot = num_started_++ % kInFlight;
  gradients_[slot].wait();
  const Tensor all = bucket.gradients();
  Tensor arrived = arrived_[slot].rows(0, bucket.numel);
  arrived.dtype = all.dtype;  // with bf16 it fills only half of the memory
  gradients_[slot] = bucket.group->start_reduce_scatter_sum(s, owned(all, bucket), all, arrived);
}

void BucketExchange::reduce(Stream& s) {
  if (layer_gradients_) layer_gradients_->finish(s);
  join_gradients();
  for (size_t b = 0; b < states_.size(); ++b) {
    const GradBucket& bucket = buckets_.all()[b];
    if (!states_[b].reduced && keeps_whole_gradients(bucket)) {
      const Tensor all = bucket.gradients();
      bucket.group->reduce_scatter_sum(s, owned(all, bucket), all);
    }
    states_[b].reduced = false;
    states_[b].gradients_left = 0;
  }
}

void BucketExchange::gather_gradients(Stream& s, const std::function<bool(const ParamSpec&)>& of) {
  for (const GradBucket& bucket : buckets_.all()) {
    const auto is_asked = [&](const Param* p) { return of(p->spec); };
    if (bucket.group->size() == 1 || std::none_of(bucket.params.begin(), bucket.params.end(), is_asked)) continue;
    MOEBIUS_ASSERT(!bucket.shards_gradients());
    const Tensor all = bucket.gradients();
    bucket.group->all_gather(s, all, owned(all, bucket));
  }
}

// --- quantised weights ----------------------------------------------------------------------------------------------

namespace {

int64_t num_scales(const GradBucket& bucket) {
  int64_t sum = 0;
  for (const Param* p : bucket.params) sum += p->scales.numel();
  return sum;
}

}  // namespace

void BucketExchange::declare_magnitudes(MemoryPlan& plan) {
  int64_t most = 0;
  for (const GradBucket& bucket : buckets_.all()) most = std::max(most, bucket.group->size() * num_scales(bucket));
  if (most > 0) plan.declare(magnitudes_, "weight_magnitudes", {most}, DType::i32, Life::comm);
}

void BucketExchange::quantise_weights(Stream& s) {
  for (const GradBucket& bucket : buckets_.all())
    if (bucket.is_quantised()) quantise(s, bucket);
}

// The owners quantise their elements, and all ranks compute the scales.
void BucketExchange::quantise(Stream& s, const GradBucket& bucket) {
  const int64_t W = bucket.group->size(), B = num_scales(bucket);
  const Tensor all = magnitudes_.rows(0, W * B),
               mine = all.rows(bucket.group->rank() * B, (bucket.group->rank() + 1) * B);
  int64_t first = 0;
  for (const Param* p : bucket.params) {
    block_magnitudes(s, {.bits_B = mine.rows(first, first + p->scales.numel()),
                         .x_n = p->master(),
                         .whole = p->spec.shape,
                         .first = p->owned.begin,
                         .rounded = p->spec.dtype});
    first += p->scales.numel();
  }
  if (W > 1) bucket.group->all_gather(s, all, mine);
  first = 0;
  for (const Param* p : bucket.params) {
    quantize_shard(s, {.q_n = p->owned_weights(),
                       .scales = p->scales,
                       .bits_WB = all.view({W, B}),
                       .first_block = first,
                       .x_n = p->master(),
                       .whole = p->spec.shape,
                       .first = p->owned.begin,
                       .rounded = p->spec.dtype});
    first += p->scales.numel();
  }
}

// --- weights --------------------------------------------------------------------------------------------------------

void BucketExchange::weights_changed(Stream& s) {
  quantise_weights(s);
  if (layer_weights_) layer_weights_->changed(s);
  if (!overlap_) return gather_all(s);
  weights_are_old_ = true;
  if (s.capture()) s.capture()->after_replay([this] { weights_are_old_ = true; });
}

void BucketExchange::gather_all(Stream& s) {
  for (const GradBucket& bucket : buckets_.all()) {
    if (!keeps_whole_weights(bucket)) continue;
    const Tensor all = bucket.weights();
    bucket.group->all_gather(s, all, owned(all, bucket));
  }
}

void BucketExchange::start_gather(Stream& s) {
  weights_are_old_ = false;
  // The last bucket holds the parameters that a forward pass reads first.
  for (size_t b = states_.size(); b-- > 0;) {
    const GradBucket& bucket = buckets_.all()[b];
    if (!keeps_whole_weights(bucket)) continue;
    states_[b].weights.wait();
    const Tensor all = bucket.weights();
    states_[b].weights = bucket.group->start_all_gather(s, all, owned(all, bucket));
  }
}

void BucketExchange::gather(Stream& s, const ParamSpan& span) {
  if (weights_are_old_) start_gather(s);
  if (layer_weights_) layer_weights_->gather(s, span, runs_passes_);
}

void BucketExchange::ready(Stream& s, const ParamSpan& span) {
  if (weights_are_old_) start_gather(s);
  if (layer_weights_) layer_weights_->ready(s, span);
  for (size_t i = span.begin; i < span.end; ++i)
    if (const int b = buckets_.bucket_of(i); b >= 0) states_[b].weights.wait();
}

void BucketExchange::release(Stream&, const ParamSpan& span) {
  if (layer_weights_) layer_weights_->release(span);
}

void BucketExchange::wait_for_weights(Stream& s) {
  if (weights_are_old_) start_gather(s);
  for (State& state : states_) state.weights.wait();
}

}  // namespace moebius
