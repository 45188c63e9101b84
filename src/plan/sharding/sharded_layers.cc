#include "plan/sharding/sharded_layers.h"

#include <algorithm>
#include <cmath>

#include "comm/group_cost.h"

namespace moebius {
namespace {

// Returns the traffic of one layer, whose buckets hold no other layer.
LayerTraffic traffic_of(const EngineSpec& spec, const PartWork& layer) {
  std::vector<HeldParam> params;
  for (const ParamSize& p : layer.params) params.push_back({&p, 0});
  LayerTraffic traffic;
  const auto add = [](std::map<Axis, LayerTraffic::Sent>& to, const ParamBucket& bucket, double wire_bytes,
                      int64_t ranks) {
    LayerTraffic::Sent& sent = to[bucket.axis];
    sent.wire_bytes += wire_bytes;
    sent.ranks = ranks;
    ++sent.calls;
  };
  const auto add_gather = [&](std::map<Axis, LayerTraffic::Sent>& to, const ParamBucket& bucket, int64_t ranks) {
    const auto bytes = static_cast<double>(bytes_of(bucket.dtype, bucket.numel));
    add(to, bucket, all_gather_cost(bytes, ranks).wire_bytes, ranks);
  };
  const std::vector<ParamBucket> trained = buckets_of(spec, params), frozen = frozen_buckets_of(spec, params);
  for (const auto* buckets : {&trained, &frozen})
    for (const ParamBucket& bucket : *buckets) {
      const int64_t all = group_size(spec.mesh, bucket.axis);
      if (bucket.shards_weights && spec.offload_weights)
        traffic.host_bytes +=
            static_cast<double>(bytes_of(bucket.dtype, bucket.numel / shard_size(spec.mesh, bucket.axis)));
      if (bucket.shards_weights && all > 1) {
        add_gather(traffic.weights, bucket, shard_size(spec.mesh, bucket.axis));
        if (spec.mesh.fsdp_shard > 0) add_gather(traffic.first_weights, bucket, all);
      }
      if (bucket.shards_gradients) add(traffic.gradients, bucket, gradient_wire_bytes(spec, bucket), all);
    }
  return traffic;
}

// One exchange of a layer.
struct Exchange {
  AxisFigures bytes{}, seconds{};
  double messages = 0, all_s = 0, memory_s = 0;
};

Exchange exchange_of(const TimeContext& c, const std::map<Axis, LayerTraffic::Sent>& sent, GroupCall call) {
  Exchange e;
  for (const auto& [axis, of_axis] : sent) {
    const auto i = static_cast<size_t>(axis);
    RankSpan span = span_of_gradients(c.spec, axis);
    if (of_axis.ranks > 0) span.size = of_axis.ranks;
    if (axis == Axis::etp_edp && span.size <= c.spec.mesh.etp) span.stride = 1;  // neighbours
    const auto calls = static_cast<double>(of_axis.calls);
    e.bytes[i] = of_axis.wire_bytes;
    e.seconds[i] = calls * group_seconds(c, span, call, of_axis.wire_bytes / calls);
    e.messages += calls * group_messages(c, span, call);
    e.all_s += e.seconds[i];
    e.memory_s += memory_seconds(c, span, call, of_axis.wire_bytes);
  }
  return e;
}

class ShardedStep {
 public:
  ShardedStep(const TimeContext& c, const std::vector<LayerTraffic>& layers, const std::vector<LayerSeconds>& passes)
      : overlaps_(c.spec.overlap),
        closes_(c.spec.graph && c.spec.target == DeviceKind::cuda && c.spec.mesh.pp == 1),
        passes_(passes),
        buffers_(overlaps_ ? 2 : 1, kNone),
        arrived_(layers.size()),
        last_gather_s_(layers.size()) {
    for (const LayerTraffic& layer : layers) {
      const auto& first = layer.first_weights.empty() ? layer.weights : layer.first_weights;
      first_gather_.push_back(exchange_of(c, first, GroupCall::all_gather));
      gather_.push_back(exchange_of(c, layer.weights, GroupCall::all_gather));
      const double host_s = layer.host_bytes > 0 && c.machine.is_gpu ? layer.host_bytes / c.machine.one_way_link() : 0;
      for (Exchange* each : {&first_gather_.back(), &gather_.back()}) each->all_s = std::max(each->all_s, host_s);
      sum_.push_back(exchange_of(c, layer.gradients, GroupCall::reduce_scatter));
    }
    done_.first_gathers.resize(layers.size());
    done_.gathers.resize(layers.size());
    done_.sums.resize(layers.size());
  }

  // Runs the forward passes of a stage, which has the layers [begin, end).
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
  // Ends a micro-batch; `left` more follow. If the next one begins in the same state as this one did, adds the times of
  // all that follow, and returns true.
  bool ends_micro_batch(int64_t left) {
    if (closes_) {
      wait_until(summed_, done_.gradients_s);
      std::fill(buffers_.begin(), buffers_.end(), kNone);
    }
    State state{.buffers = buffers_, .waits = {std::max(0.0, link_ - now_), std::max(0.0, summed_ - now_)}};
    for (const size_t i : buffers_) state.waits.push_back(i == kNone ? 0 : std::max(0.0, arrived_[i] - now_));
    const bool is_same = state == began_;
    if (is_same) done_.add(before_, static_cast<double>(left));
    began_ = std::move(state);
    before_ = done_;
    return is_same;
  }
  ShardedTime end() {
    wait_until(summed_, done_.gradients_s);
    ShardedTime time;
    add(time.weights, first_gather_, done_.first_gathers);
    add(time.weights, gather_, done_.gathers);
    add(time.gradients, sum_, done_.sums);
    time.weights.exposed_s = done_.weights_s;
    time.gradients.exposed_s = done_.gradients_s;
    return time;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  // The exchanges of each layer up to now, and the seconds that passes waited.
  struct Done {
    std::vector<double> first_gathers, gathers, sums;  // [layer]
    double weights_s = 0, gradients_s = 0;
    // Adds `times` times the work since `before`, except the first gathers of a step.
    void add(const Done& before, double times) {
      for (size_t i = 0; i < gathers.size(); ++i) {
        gathers[i] += times * (gathers[i] - before.gathers[i]);
        sums[i] += times * (sums[i] - before.sums[i]);
      }
      weights_s += times * (weights_s - before.weights_s);
      gradients_s += times * (gradients_s - before.gradients_s);
    }
  };
  // The state on which the next micro-batch depends: the layers in the buffers, and the seconds until the link is free,
  // until the last sum of gradients has arrived, and until the layers in the buffers have arrived.
  struct State {
    std::vector<size_t> buffers;
    std::vector<double> waits;
    bool operator==(const State& o) const {
      constexpr double kRounding = 1e-12;  // seconds
      return buffers == o.buffers && std::equal(waits.begin(), waits.end(), o.waits.begin(), o.waits.end(),
                                                [](double a, double b) { return std::abs(a - b) <= kRounding; });
    }
  };

  static void add(LayerExchange& all, const std::vector<Exchange>& of_layer, const std::vector<double>& times) {
    for (size_t i = 0; i < of_layer.size(); ++i) {
      for (size_t a = 0; a < all.bytes.size(); ++a) {
        all.bytes[a] += times[i] * of_layer[i].bytes[a];
        all.seconds[a] += times[i] * of_layer[i].seconds[a];
      }
      all.messages += times[i] * of_layer[i].messages;
      all.all_s += times[i] * of_layer[i].all_s;
      all.memory_s += times[i] * of_layer[i].memory_s;
    }
  }
  void gather_early(size_t i) {
    if (overlaps_) bring(i);
  }
  void bring(size_t i) {
    size_t& holder = buffers_[i % buffers_.size()];
    if (first_gather_[i].all_s == 0 || holder == i) return;
    holder = i;
    arrived_[i] = send(gather_of(i).all_s);
    last_gather_s_[i] = gather_of(i).all_s;
    ++(is_first(i) ? done_.first_gathers : done_.gathers)[i];
  }
  // The first gather of a layer in a step may be over more ranks.
  bool is_first(size_t i) const { return done_.first_gathers[i] == 0; }
  const Exchange& gather_of(size_t i) const { return (is_first(i) ? first_gather_ : gather_)[i]; }
  // While sums of gradients before the gather occupy the link, the pass waits for them.
  void ready(size_t i) {
    bring(i);
    wait_until(std::min(arrived_[i] - last_gather_s_[i], summed_), done_.gradients_s);
    wait_until(arrived_[i], done_.weights_s);
  }
  // The sums of one layer are in flight at a time.
  void sum_gradients(size_t i) {
    if (sum_[i].all_s == 0) return;
    wait_until(summed_, done_.gradients_s);
    summed_ = send(sum_[i].all_s);
    ++done_.sums[i];
    if (!overlaps_) wait_until(summed_, done_.gradients_s);
  }
  // Returns the time when it has arrived.
  double send(double seconds) { return link_ = std::max(link_, now_) + seconds; }
  void wait_until(double time, double& waited) {
    waited += std::max(0.0, time - now_);
    now_ = std::max(now_, time);
  }

  const bool overlaps_;
  const bool closes_;  // a micro-batch is a CUDA graph, which begins and ends with empty buffers
  const std::vector<LayerSeconds>& passes_;
  std::vector<Exchange> first_gather_, gather_, sum_;  // [layer]
  std::vector<size_t> buffers_;                        // the layer of the weights in the buffer
  std::vector<double> arrived_, last_gather_s_;        // [layer]: the end of its last gather, and its seconds
  double now_ = 0, link_ = 0;                          // link_: when it is free
  double summed_ = 0;                                  // when the last sum has arrived
  Done done_, before_;                                 // now, and at the begin of the micro-batch
  State began_;                                        // the micro-batch
};

}  // namespace

std::vector<LayerTraffic> layer_traffic(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  if (!spec.fsdp && !spec.shard_gradients && !spec.offload_weights) return {};
  std::map<const PartWork*, LayerTraffic> known;
  std::vector<LayerTraffic> layers;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i) {
      const PartWork& layer = parts.layer(i);
      const auto [traffic, is_new] = known.try_emplace(&layer);
      if (is_new) traffic->second = traffic_of(spec, layer);
      layers.push_back(traffic->second);
    }
  }
  return layers;
}

ShardedTime sharded_time(const TimeContext& c, const std::vector<LayerTraffic>& layers,
                         const std::vector<LayerSeconds>& passes, const std::vector<int64_t>& stages) {
  if (layers.empty()) return {};
  MOEBIUS_ASSERT(layers.size() == passes.size());
  std::vector<size_t> begins{0};
  for (const int64_t n : stages) begins.push_back(begins.back() + static_cast<size_t>(n));
  ShardedStep step(c, layers, passes);
  for (int64_t m = 1; m <= c.spec.num_micro_batches; ++m) {
    for (size_t v = 0; v < stages.size(); ++v) {
      step.forward(begins[v], begins[v + 1]);
      const size_t last = stages.size() - 1 - v;
      step.backward(begins[last], begins[last + 1]);
    }
    if (step.ends_micro_batch(c.spec.num_micro_batches - m)) break;
  }
  return step.end();
}

ShardedTime sharded_time(const TimeContext& c, LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const std::vector<LayerTraffic> layers = layer_traffic(parts, layout, pp_rank);
  if (layers.empty()) return {};
  std::map<const PartWork*, LayerSeconds> known;
  std::vector<LayerSeconds> passes;
  std::vector<int64_t> stages;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    stages.push_back(stage.num_layers);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i) {
      const PartWork& layer = parts.layer(i);
      const auto [seconds, is_new] = known.try_emplace(&layer);
      if (is_new) {
        const PartTime t = part_time(c, layer, c.spec.model.is_moe_layer(i), true);
        seconds->second = {.forward = t.forward.total(), .backward = t.backward.total()};
      }
      passes.push_back(seconds->second);
      passes.back().has_backward = i >= parts.first_backward();
    }
  }
  return sharded_time(c, layers, passes, stages);
}

}  // namespace moebius
