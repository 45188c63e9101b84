#include "plan/sharding/sharded_layers.h"

#include <algorithm>

namespace moebius {

std::vector<LayerTraffic> layer_traffic(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  if (!spec.fsdp && !spec.shard_gradients) return {};
  const std::vector<HeldParam> params = params_of(parts, layout, pp_rank);
  int64_t num_layers = 0;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) num_layers += layout.at(pp_rank, v).num_layers;
  std::vector<LayerTraffic> layers(static_cast<size_t>(num_layers));
  const auto add = [&](std::map<Axis, LayerTraffic::Sent> LayerTraffic::*to, const ParamBucket& bucket, DType dtype,
                       int64_t ranks) {
    const auto n = static_cast<double>(ranks);
    LayerTraffic::Sent& sent = (layers[static_cast<size_t>(bucket.layer)].*to)[bucket.axis];
    sent.wire_bytes += static_cast<double>(bytes_of(dtype, bucket.numel)) * (n - 1) / n;
    sent.ranks = ranks;
    ++sent.calls;
  };
  const std::vector<ParamBucket> trained = buckets_of(spec, params), frozen = frozen_buckets_of(spec, params);
  for (const auto* buckets : {&trained, &frozen})
    for (const ParamBucket& bucket : *buckets) {
      const int64_t all = group_size(spec.mesh, bucket.axis);
      if (bucket.shards_weights) {
        add(&LayerTraffic::weights, bucket, bucket.dtype, shard_size(spec.mesh, bucket.axis));
        if (spec.mesh.fsdp_shard > 0) add(&LayerTraffic::first_weights, bucket, bucket.dtype, all);
      }
      if (bucket.shards_gradients) add(&LayerTraffic::gradients, bucket, DType::f32, all);
    }
  return layers;
}

namespace {

class ShardedStep {
 public:
  ShardedStep(const TimeContext& c, const std::vector<LayerTraffic>& layers, const std::vector<LayerSeconds>& passes)
      : c_(c),
        layers_(layers),
        passes_(passes),
        buffers_(c.spec.overlap ? 2 : 1, kNone),
        arrived_(layers.size()),
        gather_s_(layers.size()),
        was_gathered_(layers.size()) {}

  // Layers [begin, end) are a stage.
  void forward(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + 1 < end) gather_early(i + 1);
      ready(i);
      now_ += passes_[i].forward;
    }
  }
  void backward(size_t begin, size_t end) {
    for (size_t i = end; i-- > begin && passes_[i].has_backward;) {
      if (i > begin && passes_[i - 1].has_backward) gather_early(i - 1);
      ready(i);
      now_ += passes_[i].backward;
      sum_gradients(i);
    }
  }
  ShardedTime end() {
    wait_until(summed_, time_.gradients);
    return std::move(time_);
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  void gather_early(size_t i) {
    if (c_.spec.overlap) bring(i);
  }
  void bring(size_t i) {
    size_t& holder = buffers_[i % buffers_.size()];
    if (layers_[i].weights.empty() || holder == i) return;
    holder = i;
    const double before = time_.weights.all_s;
    const bool first = !was_gathered_[i] && !layers_[i].first_weights.empty();
    was_gathered_[i] = true;
    arrived_[i] = send(first ? layers_[i].first_weights : layers_[i].weights, GroupCall::all_gather, time_.weights);
    gather_s_[i] = time_.weights.all_s - before;
  }
  // While sums of gradients before the gather occupy the link, the pass waits for them.
  void ready(size_t i) {
    bring(i);
    wait_until(std::min(arrived_[i] - gather_s_[i], summed_), time_.gradients);
    wait_until(arrived_[i], time_.weights);
  }
  // The sums of one layer are in flight at a time.
  void sum_gradients(size_t i) {
    if (layers_[i].gradients.empty()) return;
    wait_until(summed_, time_.gradients);
    summed_ = send(layers_[i].gradients, GroupCall::reduce_scatter, time_.gradients);
    if (!c_.spec.overlap) wait_until(summed_, time_.gradients);
  }
  // Returns the time when it has arrived.
  double send(const std::map<Axis, LayerTraffic::Sent>& sent, GroupCall call, LayerExchange& exchange) {
    double all = 0;
    for (const auto& [axis, of_axis] : sent) {
      const std::string name(name_of(axis));
      RankSpan span = span_of(c_.spec.mesh, name);
      if (of_axis.ranks > 0) span.size = of_axis.ranks;
      const auto calls = static_cast<double>(of_axis.calls);
      const double seconds = calls * group_seconds(c_, span, call, of_axis.wire_bytes / calls);
      exchange.bytes[name] += of_axis.wire_bytes;
      exchange.seconds[name] += seconds;
      exchange.messages += calls * group_messages(span, call);
      all += seconds;
    }
    exchange.all_s += all;
    link_ = std::max(link_, now_) + all;
    return link_;
  }
  void wait_until(double time, LayerExchange& exchange) {
    const double waited = std::max(0.0, time - now_);
    exchange.exposed_s += waited;
    now_ += waited;
  }

  const TimeContext& c_;
  const std::vector<LayerTraffic>& layers_;
  const std::vector<LayerSeconds>& passes_;
  std::vector<size_t> buffers_;     // the layer whose weights are there
  std::vector<double> arrived_;     // [layer]: the time of its last gather's end
  std::vector<double> gather_s_;    // [layer]: the seconds of that gather
  std::vector<bool> was_gathered_;  // [layer]: in this step
  double now_ = 0, link_ = 0;       // link_: when it is free
  double summed_ = 0;               // when the last sum has arrived
  ShardedTime time_;
};

}  // namespace

ShardedTime sharded_time(const TimeContext& c, const std::vector<LayerTraffic>& layers,
                         const std::vector<LayerSeconds>& passes, const std::vector<int64_t>& stages) {
  if (layers.empty()) return {};
  MOEBIUS_ASSERT(layers.size() == passes.size());
  std::vector<size_t> begins{0};
  for (const int64_t n : stages) begins.push_back(begins.back() + static_cast<size_t>(n));
  ShardedStep step(c, layers, passes);
  for (int64_t m = 0; m < c.spec.num_micro_batches; ++m)
    for (size_t v = 0; v < stages.size(); ++v) {
      step.forward(begins[v], begins[v + 1]);
      const size_t last = stages.size() - 1 - v;
      step.backward(begins[last], begins[last + 1]);
    }
  return step.end();
}

ShardedTime sharded_time(const TimeContext& c, LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const std::vector<LayerTraffic> layers = layer_traffic(parts, layout, pp_rank);
  if (layers.empty()) return {};
  std::vector<LayerSeconds> passes;
  std::vector<int64_t> stages;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    stages.push_back(stage.num_layers);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i) {
      const PartTime t = part_time(c, parts.layer(i), c.spec.model.is_moe_layer(i), true);
      passes.push_back(
          {.forward = t.forward.total(), .backward = t.backward.total(), .has_backward = i >= parts.first_backward()});
    }
  }
  return sharded_time(c, layers, passes, stages);
}

}  // namespace moebius
