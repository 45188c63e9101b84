#include <functional>
#include <optional>

#include "bench/moe_check.h"
#include "bench/moe_layer.h"
#include "bench/timing.h"

namespace moebius {
namespace {

// One layer, and the lines of its report.
class MoeBench {
 public:
  MoeBench(const BenchSpec& spec, const BenchShape& shape)
      : spec_(spec),
        shape_(shape),
        device_(spec),
        report_{.ceilings = device_.measure_ceilings(spec.scale)},
        layer_(shape, spec.device, device_.pool(), spec.first_micro_batch) {
    const BenchRoute route = bench_route(shape, spec.routing);
    is_routable_ = !route.logits_TE.empty();
    layer_.fill(s(), route);
    report_.kept_bytes = layer_.kept_bytes();
  }

  BenchReport run() {
    if (is_routable_)  // first, because it leaves the logits
      add_pair(
          true, [&](Stream& on) { layer_.forward_router(on); }, [&](Stream& on) { layer_.backward_router(on); });
    const Pass forward = [&](Stream&on) { layer_.forward(on, is_routable_); },
               backward = [&](Stream&on) { layer_.backward(on); };
    add_pair(false, forward, backward);
    if (spec_.profile) profile(both(forward, backward));
    return report_;
  }

 private:
  using Pass = std::function<void(Stream&)>;
  static Pass both(const Pass& forward, const Pass& backward) {
    return [&](Stream& on) {
      forward(on);
      backward(on);
    };
  }
  Stream& s() { return device_.stream(); }

  void add_pair(bool with_router, const Pass& forward, const Pass& backward) {
    const double flops = static_cast<double>(6 * shape_.R() * shape_.D * shape_.F);
    const std::string suffix = with_router ? "_router" : "";
    add_line({.name = "moe_layer_fwd" + suffix, .cost = {flops, 0}}, forward);
    BenchLine& line = add_line({.name = "moe_layer_fwd_bwd" + suffix, .cost = {3 * flops, 0}}, both(forward, backward));
    check_->dx(s(), line, layer_.dx_TD, with_router);
    check_->dw(s(), line, layer_.dw1_e2FD(), layer_.dw2_eDF(), spec_.first_micro_batch ? 1 : calls_);
  }

  BenchLine& add_line(BenchLine line, const Pass& body) {
    const std::vector<Cost> ops = costs_of(spec_.device, device_.pool(), body);
    for (const Cost& op : ops) line.cost.bytes += op.bytes;
    line.roofline_ms = roofline_ms(ops, report_.ceilings);
    layer_.clear(s());
    calls_ = device_.time(line, [&] { body(s()); });
    if (!check_) check_.emplace(s(), inputs());
    check_->y(s(), line, layer_.y_TD);
    return report_.lines.emplace_back(line);
  }

  // Is valid after the layer has chosen its experts. All lines have the same route.
  MoeInputs inputs() const {
    return {.shape = shape_,
            .is_routed = is_routable_,
            .x_TD = layer_.x_TD,
            .dy_TD = layer_.dy_TD,
            .w1_e2FD = layer_.w1_e2FD(),
            .w2_eDF = layer_.w2_eDF(),
            .topk_TK = layer_.topk_TK()};
  }

  void profile(const Pass& body) {
    report_.profiled_runs = report_.lines.back().runs;
    report_.ops = device_.profile(report_.profiled_runs, body);
  }

  BenchSpec spec_;
  BenchShape shape_;
  BenchDevice device_;
  BenchReport report_;
  BenchMoeLayer layer_;
  bool is_routable_ = false;
  std::optional<MoeCheck> check_;
  int64_t calls_ = 0;  // calls of the last line's body
};

}  // namespace

BenchReport bench_moe_layer(const BenchSpec& spec) {
  const BenchShape shape = bench_shape(spec.shape, spec.scale);
  MOEBIUS_CHECK(usage, shape.E < shape.D,
                "bench moe-layer: expected fewer experts than the width of the model, {}; got {}", shape.D, shape.E);
  return MoeBench(spec, shape).run();
}

}  // namespace moebius
