// A single MoE layer of a bench shape, with its memory plan.
#pragma once

#include "bench/shapes.h"
#include "model/moe/dispatched_experts.h"
#include "model/moe/router/router.h"

namespace moebius {

// Declares the tensors of a route for tokens of the shape.
void declare_route(MemoryPlan& plan, const BenchShape& shape, Route& route);
// Fills them with a route and equal weights, without a router.
void upload_route(Stream& s, const BenchShape& shape, const BenchRoute& route, const Route& to);

// A router and experts, as an MoE layer of a model without a shared expert (model/moe/moe.h) runs them. Without the
// router it is the part after the logits. It computes in bf16, with gradients in f32, and its products are quantised by
// the recipe of `precision`.
// The router's weights are the identity, so the logits of token t are x[t, 0 .. E).
class BenchMoeLayer {
 public:
  // first_micro_batch: each backward pass stores the weights' gradients; else it adds to them.
  BenchMoeLayer(const BenchShape& shape, const PrecisionSpec& precision, DeviceKind device, ThreadPool& pool,
                bool first_micro_batch = false);
  BenchMoeLayer(const BenchMoeLayer&) = delete;

  // Fills inputs and weights with random numbers, the same for every precision. The router takes its logits from x, so
  // that it chooses the requested route. With a recipe call quantise_weights() afterwards.
  void fill(Stream& s, const BenchRoute& route);
  // Makes the quantised weights that all passes read, as a training step does once. Without a recipe there are none.
  void quantise_weights(Stream& s);
  // Sets outputs and weight gradients to zero, so that a check after a call reads only what
  // that call wrote.
  void clear(Stream& s);

  void forward_router(Stream& s);
  void backward_router(Stream& s);
  void forward(Stream& s, bool choose);  // choose: by the logits of forward_router, else fill's route
  void backward(Stream& s);

  int64_t kept_bytes() const;
  Tensor topk_TK() const { return saved_.router.route.topk_TK; }
  const Tensor& w1_e2FD() const { return w1_.w; }
  const Tensor& w2_eDF() const { return w2_.w; }
  const Tensor& dw1_e2FD() const { return w1_.dw; }
  const Tensor& dw2_eDF() const { return w2_.dw; }

  Tensor x_TD, y_TD, dx_TD, dy_TD;

 private:
  const DispatchedExperts::Saved& experts_saved() const { return DispatchedExperts::own(*saved_.experts); }
  BatchShape batch_shape() const { return {.batch = shape_.batch, .seq = shape_.seq}; }
  template <class Body>
  void with_step(Stream& s, Body body);
  int64_t stack_bytes(ThreadPool& pool);
  LayerContext context();
  void put_logits_in_x(Stream& s, const std::vector<float>& logits_TE);
  void route_tokens(Step& step);

  struct Saved {
    Router::Saved router;
    std::unique_ptr<RoutedExperts::Saved> experts;
  };
  BenchShape shape_;
  ModelSpec model_;
  PrecisionSpec precision_;
  BalanceSpec balance_;
  const Tensor no_rope_table_;
  DeviceKind target_;
  MemoryPlan plan_;
  ParamTable params_;
  Mesh mesh_{MeshShape{}};
  MicroBatch batch_;
  Router router_;
  std::unique_ptr<RoutedExperts> experts_;
  const Param &w1_, &w2_;
  Saved saved_;
  Tensor load_E_, dropped_1_;
  int64_t high_water_ = 0;
};

}  // namespace moebius
