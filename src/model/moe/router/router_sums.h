// The metrics of the routers of a model in a step. Those of all layers are in two tensors, so that two sums over the
// ranks reduce them, however many layers there are.
#pragma once

#include <vector>

#include "comm/mesh.h"
#include "memory/plan.h"

namespace moebius {

// The metrics of one MoE layer in a step: sums over micro-batches and ranks.
struct RouterMetrics {
  Tensor load_E;     // i64  tokens sent to each expert, before any drop
  Tensor dropped_1;  // i64  pairs dropped by capacity
  Tensor aux_1;      // f64  balance losses, with their coefficients
  Tensor z_1;        // f64  sum of logsumexp^2; the z-loss is z_coeff / tokens times this
  Tensor entropy_1;  // f64  sum over tokens of the entropy of their scores
};

class RouterSums {
 public:
  RouterSums() = default;
  RouterSums(const RouterSums&) = delete;

  // Adds a layer, and returns its index. REQUIRES: declare() was not called.
  size_t add_layer(int64_t num_experts);
  // Declares the memory of all layers. The plan writes to this object when it binds memory.
  void declare(MemoryPlan& plan);
  RouterMetrics of_layer(size_t layer) const;

  // Sums over the ranks, once per global batch. Each rank of tp x cp has its own tokens, but the whole balance losses
  // of its micro-batches; only the first of these ranks adds them.
  void reduce(Stream& s, const Mesh& mesh) const;

 private:
  std::vector<int64_t> first_ = {0};  // the first element of each layer in counts_N, and then N
  Tensor counts_N;                    // i64: of each layer the load of its experts, and the dropped pairs
  Tensor sums_3L;                     // f64: aux, z and entropy of all layers
};

}  // namespace moebius
