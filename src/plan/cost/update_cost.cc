#include "plan/cost/update_cost.h"

#include <algorithm>

#include "parallel/optim/optimizer.h"

namespace moebius {
namespace {

// A launch updates at most this many tensors (kMaxTensors in ops/cuda/tensors.h).
constexpr int64_t kTensorsOfLaunch = 56;
// Clears of an MoE layer's load, drops and three figures (Router::end_of_step()). Each is counted, as in the programs
// that the measured runs are of; fill_zeros() (ops/elementwise/fill_zeros.h) has few kernels for them.
constexpr int64_t kClearsOfRouter = 5;

struct PartKernels {
  int64_t tensors = 0, clears = 0;
};

PartKernels kernels_of(const PartWork& part, bool shards_gradients) {
  PartKernels kernels;
  for (const ParamSize& p : part.params) {
    if (!p.has_grad) continue;
    ++kernels.tensors;
    kernels.clears += !p.grad_stored_first && !p.sums_apart && !shards_gradients;
  }
  return kernels;
}

}  // namespace

double update_bytes(const OptimizerSpec& optimizer) {
  const double kept = static_cast<double>(master_bytes(optimizer, DType::bf16)) + state_bytes(optimizer);
  const int64_t weight = optimizer.master == MasterFormat::f32 ? 2 : 4;  // which is read too, unless it has a master
  return static_cast<double>(4 + weight + 4) + 2 * kept;
}

double update_operations(const OptimizerSpec& optimizer) {
  if (optimizer.state != StateFormat::blocks_8bit) return 0;
  return kCodeOperations * static_cast<double>(num_moments(optimizer));
}

double host_states_bytes(const OptimizerSpec& optimizer, double owned) {
  if (!optimizer.offload) return 0;
  const double all = owned * (static_cast<double>(master_bytes(optimizer, DType::bf16)) + state_bytes(optimizer));
  return std::max(0.0, all - optimizer.offload_buffer.value_or(0) * static_cast<double>(int64_t{1} << 30));
}

double host_update_bytes(const OptimizerSpec& optimizer, double owned) {
  return host_states_bytes(optimizer, owned) + (optimizer.offload_grad ? 2 * owned : 0);
}

double exposed_update_seconds(double moves_s, double kernels_s, double pass_s) {
  if (moves_s <= kernels_s) return 0;
  const double beside = std::clamp(pass_s / moves_s, 0.0, 1.0);  // the part of the update
  return moves_s - kernels_s - beside * (moves_s - kernels_s);
}

EndOfStep end_of_step(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  const ModelSpec& m = spec.model;
  const int64_t of_router = kClearsOfRouter + (spec.balance.bias ? 1 : 0) + (spec.balance.global_aux ? 2 : 0);
  int64_t tensors = 0, kernels = 0;
  const auto add = [&](const PartWork& part, int64_t moe_layers) {
    const PartKernels of_part = kernels_of(part, spec.shard_gradients);
    tensors += of_part.tensors;
    kernels += of_part.clears + moe_layers * of_router;
  };
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i)
      add(parts.layer(i), m.is_moe_layer(i) ? 1 : 0);
    add(parts.ends(stage), spec.shape.num_mtp > 0 && m.is_moe_layer(m.num_layers) ? stage.num_mtp : 0);
  }
  // The norm is a clear, a sum of parts and of these for each launch, and the scale; the loss has a sum for each depth.
  const int64_t of_norm = 2 + 2 * div_ceil(tensors, kTensorsOfLaunch), of_loss = spec.shape.num_mtp > 0 ? 2 : 1;
  return {.kernels = kernels + of_norm + of_loss + div_ceil(tensors, kTensorsOfLaunch), .tensors = tensors};
}

}  // namespace moebius
