#include "plan/cost/megatron_memory.h"

#include <algorithm>

namespace moebius {

std::vector<int64_t> megatron_sets_in_flight(const TimeContext& c, const PipelineUse& use) {
  std::vector<int64_t> sets = use.num_in_flight;
  if (c.assume.merged_overlap && c.spec.num_micro_batches > 1) ++*std::max_element(sets.begin(), sets.end());
  return sets;
}

int64_t megatron_extra_bytes(const TimeContext& c, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank) {
  const EngineSpec& spec = c.spec;
  const ModelSpec& m = spec.model;
  const MeshShape& mesh = spec.mesh;
  const double tokens = static_cast<double>(rows_between_projections(spec.shape, mesh));
  const double rows = tokens * static_cast<double>(m.top_k);
  const double D = static_cast<double>(m.hidden_size), F = static_cast<double>(m.moe_intermediate_size);
  const PlanPrecision precision = products_precision(spec, c.assume, c.machine);
  const double input_bytes = precision == PlanPrecision::from_recipe ? 2 : precision == PlanPrecision::nvfp4 ? 0.5 : 1;
  const bool is_of_recipe = c.assume.recompute == PlanRecompute::from_recipe;
  const auto of_moe = [&](const RecomputeSpec& again) {
    // An MoE layer that is recomputed saves only its input, and not the two products of the experts.
    if (c.assume.recompute == PlanRecompute::moe) return -(again.expert_up ? 0 : 2 * rows * F * 2);
    double moe = rows * D * input_bytes;
    if (!again.expert_up && is_of_recipe) moe += rows * F * input_bytes;
    if (c.assume.permutation == PlanPermutation::plain) moe += rows * D * 2;
    return moe;
  };
  // Heads are divided over tp, and tokens between projections too.
  const auto of_layer = [&](const RecomputeSpec& again) {
    if (m.kv_lora_rank == 0 || again.covers(&RecomputeSpec::mla_up_proj)) return 0.0;
    return tokens * static_cast<double>(m.num_heads * m.rope_dim()) * 2;
  };
  double bytes = 0;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    double of_set = 0;
    for (int64_t layer = stage.first_layer; layer < stage.first_layer + stage.num_layers; ++layer) {
      const RecomputeSpec again = spec.recompute.of(layer);
      if (!again.layer) of_set += of_layer(again) + (m.is_moe_layer(layer) ? of_moe(again) : 0);
    }
    const RecomputeSpec of_mtp = spec.recompute.of(m.num_layers);
    const auto num_mtp = static_cast<double>(std::min(stage.num_mtp, spec.shape.num_mtp));
    if (!of_mtp.layer) of_set += num_mtp * (of_layer(of_mtp) + (m.is_moe_layer(m.num_layers) ? of_moe(of_mtp) : 0));
    bytes += of_set * static_cast<double>(use.num_saved[static_cast<size_t>(v)]);
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace moebius
