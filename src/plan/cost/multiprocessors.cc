#include "plan/cost/multiprocessors.h"

#include <algorithm>
#include <cmath>

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

// The result of a product of rows of experts, or of a gated layer, which counts as one expert.
struct RowsProduct {
  double rows = 0, columns = 0;  // zeros: another product
  double experts = 1;            // each has tiles of its own
};

RowsProduct rows_product(const TimeContext& c, const OpWork& op, double flops) {
  const ModelSpec& m = c.spec.model;
  const double D = static_cast<double>(m.hidden_size);
  const double F = static_cast<double>(m.moe_intermediate_size / c.spec.mesh.etp);
  const double experts = static_cast<double>(m.num_experts / c.spec.mesh.ep);
  const auto of = [&](double columns, double terms) {
    return RowsProduct{flops / (2 * columns * terms), columns, experts};
  };
  if (op.name == "expert_up") return of(2 * F, D);
  if (op.name == "d_expert_down") return of(F, D);
  if (op.name == "expert_down") return of(D, F);
  if (op.name == "d_expert_up") return of(D, 2 * F);
  if (op.name != "gated_up" && op.name != "d_gated_down") return {};
  const double rows = static_cast<double>(rows_between_projections(c.spec.shape, c.spec.mesh));
  return {rows, flops / (2 * rows * D)};
}

// Returns whether Hopper's kernels compute these products, in tiles of 128 x 256 (ops/grouped_gemm/).
bool has_wide_tiles(const TimeContext& c) {
  return c.assume.system == PlanSystem::moebius && c.spec.kernels != KernelChoice::portable &&
         c.machine.has_hopper_kernels() && c.spec.precision.compute == DType::bf16;
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
  if (const RowsProduct p = rows_product(c, op, cost.flops); p.rows > 0 && has_wide_tiles(c)) {
    // A tile whose columns are not all of the result takes as long as others.
    const double across = std::ceil(p.columns / kWideTile);
    tiles = p.experts * std::ceil(p.rows / p.experts / kTile) * across;
    return across * kWideTile / p.columns * std::max(1.0, c.machine.multiprocessors / tiles);
  }
  return std::max(1.0, c.machine.multiprocessors / std::max(1.0, tiles));
}

}  // namespace moebius
