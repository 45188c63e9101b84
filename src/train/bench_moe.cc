#include <cmath>

#include "model/moe.h"
#include "train/bench_timing.h"

namespace moebius {
namespace {

ModelSpec moe_model(double scale) {
  ModelSpec m;
  m.hidden_size = scaled(512, scale);
  m.moe_intermediate_size = scaled(1024, scale);
  m.num_experts = 16;
  m.top_k = 2;
  m.norm_topk_prob = true;
  m.initializer_range = 1.0 / std::sqrt(static_cast<double>(m.hidden_size));
  return m;
}

// A layer with its memory.
struct Layer {
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::gradients};
  Mesh mesh{MeshShape{}};
  MicroBatch batch;
  Moe moe;
  Moe::Saved saved;
  Tensor x_TD, y_TD, dx_TD, dy_TD;

  Layer(const ModelSpec& m, const BatchShape& shape)
      : moe(params, plan, "mlp", m, BalanceSpec{}, DType::bf16, mesh, shape, /*layer=*/0, /*seed=*/0) {
    moe.declare_saved(plan, "moe", saved);
    declare_micro_batch(plan, shape, batch);
    for (Tensor* t : {&x_TD, &y_TD, &dx_TD, &dy_TD})
      plan.declare(*t, "activation", {shape.tokens(), m.hidden_size}, DType::bf16, Life::saved);
  }
  void backward(Step& step) {
    StackScope scope(step.stack);
    moe.backward_input(step, dx_TD, dy_TD, saved);
    moe.backward_weight(step, saved);
  }
  int64_t measure_stack(ThreadPool& pool) {
    Stream s(DeviceKind::null, pool);
    StepStack stack(DeviceKind::null, nullptr, 0);
    Step step{s, stack, batch};
    moe.forward(step, y_TD, x_TD, saved);
    backward(step);
    return stack.high_water();
  }
};

const Param& param_named(const ParamTable& params, const std::string& name) {
  for (const Param& p : params.all()) {
    if (p.spec.name == name) return p;
  }
  MOEBIUS_FAIL(internal, "bench: no parameter {}", name);
}

// Sum over d of  sum over k of weight * W2 swiglu(W1 x)  of one token, by the route that the layer chose.
double token_sum(const Layer& layer, const ModelSpec& m, int64_t t) {
  const int64_t D = m.hidden_size, F = m.moe_intermediate_size, K = m.top_k;
  const Tensor w1 = param_named(layer.params, "mlp.experts.gate_up_proj").w,
               w2 = param_named(layer.params, "mlp.experts.down_proj").w;
  const Route& route = layer.saved.router.route;
  double sum = 0;
  for (int64_t k = 0; k < K; ++k) {
    const int64_t e = route.topk_TK.ptr<int32_t>()[t * K + k];
    for (int64_t f = 0; f < F; ++f) {
      double gate = 0, up = 0, column = 0;
      for (int64_t i = 0; i < D; ++i) {
        const double x = element(layer.x_TD, t * D + i);
        gate += element(w1, (e * 2 * F + f) * D + i) * x;
        up += element(w1, (e * 2 * F + F + f) * D + i) * x;
        column += element(w2, (e * D + i) * F + f);
      }
      sum += route.weight_TK.ptr<float>()[t * K + k] * gate / (1 + std::exp(-gate)) * up * column;
    }
  }
  return sum;
}

}  // namespace

std::vector<BenchLine> bench_moe_layer(const BenchSpec& spec) {
  const ModelSpec m = moe_model(spec.scale);
  const BatchShape shape{.batch = 8, .seq = scaled(512, spec.scale)};
  ThreadPool pool(spec.threads);
  Stream s(DeviceKind::cpu, pool);
  Layer layer(m, shape);
  layer.plan.bind(DeviceKind::cpu, layer.measure_stack(pool));
  layer.params.init(s, 1);
  BenchTensors tensors(s);
  layer.x_TD = tensors.normal(layer.x_TD.shape, DType::bf16, 1.0f);
  layer.dy_TD = tensors.normal(layer.dy_TD.shape, DType::bf16, 1.0f);
  Step step{s, layer.plan.stack(), layer.batch};
  const double T = static_cast<double>(shape.tokens()),
               flops = T * m.top_k * 6.0 * m.hidden_size * m.moe_intermediate_size;

  BenchLine forward{.name = "moe_layer_fwd", .cost = {flops, 0}},
      both{.name = "moe_layer_fwd_bwd", .cost = {3 * flops, 0}};
  time_runs(forward, spec.runs, [&] { layer.moe.forward(step, layer.y_TD, layer.x_TD, layer.saved); });
  time_runs(both, spec.runs, [&] {
    layer.moe.forward(step, layer.y_TD, layer.x_TD, layer.saved);
    layer.backward(step);
  });
  for (const int64_t t : sampled(shape.tokens())) {
    for (int64_t i = 0; i < m.hidden_size; ++i) forward.checksum += element(layer.y_TD, t * m.hidden_size + i);
    forward.expected += token_sum(layer, m, t);
  }
  // Rounding of h and a to bf16 moves each output by a few units as well.
  check_sum(forward, 4 * rounding(DType::bf16, 4.0 * static_cast<double>(m.hidden_size), 1.0));
  both.checksum = forward.checksum;
  both.expected = forward.expected;
  return {forward, both};
}

}  // namespace moebius
