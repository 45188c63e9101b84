#include "model/moe/router/router_sums.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {

size_t RouterSums::add_layer(int64_t num_experts) {
  first_.push_back(first_.back() + num_experts + 1);
  return first_.size() - 2;
}

void RouterSums::declare(MemoryPlan& plan) {
  const auto L = static_cast<int64_t>(first_.size()) - 1;
  if (L == 0) return;
  plan.declare(counts_N, "router_counts", {first_.back()}, DType::i64, Life::metrics);
  plan.declare(sums_3L, "router_sums", {3, L}, DType::f64, Life::metrics);
}

RouterMetrics RouterSums::of_layer(size_t layer) const {
  const int64_t begin = first_[layer], dropped = first_[layer + 1] - 1, L = sums_3L.dim(1);
  const auto sum = [&](int64_t kind) {
    const int64_t at = kind * L + static_cast<int64_t>(layer);
    return sums_3L.view({3 * L}).rows(at, at + 1);
  };
  return {.load_E = counts_N.rows(begin, dropped),
          .dropped_1 = counts_N.rows(dropped, dropped + 1),
          .aux_1 = sum(0),
          .z_1 = sum(1),
          .entropy_1 = sum(2)};
}

void RouterSums::reduce(Stream& s, const Mesh& mesh) const {
  if (counts_N.empty()) return;
  if (mesh.place().tp > 0 || mesh.place().cp > 0) fill_zero(s, sums_3L.rows(0, 1));
  for (const Tensor& sums : {counts_N, sums_3L}) mesh.group(Axis::tp_cp_dp).all_reduce_sum(s, sums);
}

}  // namespace moebius
