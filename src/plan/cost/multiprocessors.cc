#include "plan/cost/multiprocessors.h"

#include <algorithm>

namespace moebius {
namespace {

constexpr int64_t kTile = 128, kWideTile = 256;
constexpr double kTileFlops = 2.0 * kTile * kTile * kTile;
constexpr double kTileBytes = 3.0 * kTile * kTile * 2;  // two operands and a result of two bytes

// Returns whether an op is a product whose number of tiles grows with its FLOPs. Those of the router have few columns.
bool has_tiles(const OpWork& op) {
  if (op.name == "router_logits_fwd" || op.name == "router_logits_bwd") return false;
  return op.kind == KernelClass::products || op.kind == KernelClass::experts;
}

// Returns whether Hopper's kernels compute the gradients of expert weights, which do not split the rows of an expert.
bool keeps_rows_whole(const TimeContext& c, const OpWork& op) {
  const bool is_own = c.assume.system == PlanSystem::moebius && c.spec.kernels != KernelChoice::portable;
  return is_own && op.name == "expert_wgrad" && c.spec.precision.compute == DType::bf16;
}

}  // namespace

double idle_multiprocessors(const TimeContext& c, const OpWork& op, const Cost& cost) {
  if (c.machine.multiprocessors <= 0 || !has_tiles(op)) return 1;
  double tiles = std::max(cost.flops / kTileFlops, cost.bytes / kTileBytes);
  if (keeps_rows_whole(c, op)) {
    const ModelSpec& m = c.spec.model;
    const int64_t columns =
        2 * m.moe_intermediate_size / c.spec.mesh.etp;  // of the first weights; the second have half
    const int64_t tiles_of_expert = div_ceil(m.hidden_size, kTile) * div_ceil(columns, kWideTile);
    tiles = static_cast<double>(m.num_experts / c.spec.mesh.ep * tiles_of_expert);
  }
  return std::max(1.0, c.machine.multiprocessors / std::max(1.0, tiles));
}

}  // namespace moebius
