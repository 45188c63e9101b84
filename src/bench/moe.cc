#include <functional>
#include <memory>
#include <optional>

#include "bench/moe_check.h"
#include "bench/moe_layer.h"
#include "bench/timing.h"
#include "device/gpu_limits.h"

namespace moebius {
namespace {

// One layer in bf16, the same one with a recipe if the spec has one, and the lines of the report.
class MoeBench {
 public:
  MoeBench(const BenchSpec& spec, const BenchShape& shape)
      : spec_(spec), shape_(shape), device_(spec), report_{.ceilings = device_.measure_ceilings(spec.scale)} {
    const BenchRoute route = bench_route(shape, spec.routing);
    is_routable_ = !route.logits_TE.empty();
    add_layer(PrecisionRecipe::none, route);
    if (spec.operands != PrecisionRecipe::none) add_layer(spec.operands, route);
    report_.kept_bytes = layers_.front().layer->kept_bytes();
  }

  BenchReport run() {
    if (is_routable_)  // first, because it leaves the logits
      add_pair(
          true, [](BenchMoeLayer& layer, Stream& on) { layer.forward_router(on); },
          [](BenchMoeLayer& layer, Stream& on) { layer.backward_router(on); });
    const Pass forward = [&](BenchMoeLayer&layer, Stream&on) { layer.forward(on, is_routable_); },
               backward = [](BenchMoeLayer&layer, Stream&on) { layer.backward(on); };
    add_pair(false, forward, backward);
    if (has_recipe()) add_recipe_times();
    if (spec_.profile) profile(both(forward, backward));
    return report_;
  }

 private:
  using Pass = std::function<void(BenchMoeLayer&, Stream&)>;
  struct TimedLayer {
    std::string suffix;  // of the names of its lines
    MoeBounds bounds;
    std::unique_ptr<BenchMoeLayer> layer;
  };

  static Pass both(const Pass& forward, const Pass& backward) {
    return [forward, backward](BenchMoeLayer& layer, Stream& on) {
      forward(layer, on);
      backward(layer, on);
    };
  }
  Stream& s() { return device_.stream(); }
  bool has_recipe() const { return layers_.size() > 1; }

  void add_layer(PrecisionRecipe recipe, const BenchRoute& route) {
    PrecisionSpec precision{.recipe = recipe};
    if (device_.is_gpu()) precision.has_f8_kernels = uses_hopper_kernels(s());
    TimedLayer& added = layers_.emplace_back(TimedLayer{
        .suffix = recipe == PrecisionRecipe::none ? "" : fmt::format("_{}", name_of(recipe)),
        .bounds = MoeBounds::of(recipe),
        .layer =
            std::make_unique<BenchMoeLayer>(shape_, precision, spec_.device, device_.pool(), spec_.first_micro_batch)});
    added.layer->fill(s(), route);
    added.layer->quantise_weights(s());
  }

  void add_pair(bool with_router, const Pass& forward, const Pass& backward) {
    const double flops = static_cast<double>(6 * shape_.R() * shape_.D * shape_.F);
    const std::string suffix = with_router ? "_router" : "";
    add_lines("moe_layer_fwd" + suffix, flops, forward);
    const size_t first = report_.lines.size();
    add_lines("moe_layer_fwd_bwd" + suffix, 3 * flops, both(forward, backward));
    for (size_t i = 0; i < layers_.size(); ++i) {
      const auto& [name, bounds, layer] = layers_[i];
      BenchLine& line = report_.lines[first + i];
      check_->dx(s(), line, bounds, layer->dx_TD, with_router);
      check_->dw(s(), line, bounds, layer->dw1_e2FD(), layer->dw2_eDF(), spec_.first_micro_batch ? 1 : calls_);
    }
    if (!has_recipe()) return;
    const BenchLine &plain = report_.lines[first], &quantised = report_.lines[first + 1];
    report_.recipe_times.push_back({.name = plain.name, .bf16_ms = plain.median_ms, .recipe_ms = quantised.median_ms});
  }

  // Times the body of all layers in turns.
  void add_lines(const std::string& name, double flops, const Pass& body) {
    std::vector<std::function<void()>> bodies;
    for (TimedLayer& timed : layers_) {
      timed.layer->clear(s());
      bodies.push_back([&] { body(*timed.layer, s()); });
    }
    const TimedRuns timed = device_.time_in_turns(bodies);
    calls_ = timed.calls;
    if (!check_) check_.emplace(s(), inputs());
    for (size_t i = 0; i < layers_.size(); ++i) {
      BenchLine line{.name = name + layers_[i].suffix, .cost = {flops, 0}};
      const std::vector<Cost> ops =
          costs_of(spec_.device, device_.pool(), [&](Stream& on) { body(*layers_[i].layer, on); });
      for (const Cost& op : ops) line.cost.bytes += op.bytes;
      if (i == 0) line.roofline_ms = roofline_ms(ops, report_.ceilings);
      timed.fill(line, i);
      check_->y(s(), line, layers_[i].bounds, layers_[i].layer->y_TD);
      report_.lines.push_back(line);
    }
  }

  void add_recipe_times() {
    BenchLine weights;
    device_.time(weights, [&] { layers_.back().layer->quantise_weights(s()); });
    report_.weights_ms = weights.median_ms;
    for (RecipeTime& time : report_.recipe_times)
      time.weights_ms = weights.median_ms / static_cast<double>(spec_.micro_batches);
  }

  // Is valid after the layer has chosen its experts. All lines have the same route, inputs and weights.
  MoeInputs inputs() const {
    const BenchMoeLayer& layer = *layers_.front().layer;
    return {.shape = shape_,
            .is_routed = is_routable_,
            .is_quantised = has_recipe(),
            .x_TD = layer.x_TD,
            .dy_TD = layer.dy_TD,
            .w1_e2FD = layer.w1_e2FD(),
            .w2_eDF = layer.w2_eDF(),
            .topk_TK = layer.topk_TK()};
  }

  // With a recipe its layer is profiled.
  void profile(const Pass& body) {
    report_.profiled_runs = report_.lines.back().runs;
    report_.ops = device_.profile(report_.profiled_runs, [&](Stream& on) { body(*layers_.back().layer, on); });
  }

  BenchSpec spec_;
  BenchShape shape_;
  BenchDevice device_;
  BenchReport report_;
  std::vector<TimedLayer> layers_;  // in bf16, then with the recipe
  bool is_routable_ = false;
  std::optional<MoeCheck> check_;
  int64_t calls_ = 0;  // calls of the last lines' body
};

}  // namespace

BenchReport bench_moe_layer(const BenchSpec& spec) {
  const BenchShape shape = bench_shape(spec.shape, spec.scale);
  MOEBIUS_CHECK(usage, shape.E < shape.D,
                "bench moe-layer: expected fewer experts than the width of the model, {}; got {}", shape.D, shape.E);
  MOEBIUS_CHECK(usage, spec.micro_batches >= 1, "bench moe-layer: expected at least 1 micro-batch per step; got {}",
                spec.micro_batches);
  return MoeBench(spec, shape).run();
}

}  // namespace moebius
