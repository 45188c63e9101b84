#include "plan/cost/part_key.h"

#include <bit>

#include "model/moe/expert_rows.h"

namespace moebius {
namespace {

int64_t offload_bits(const OffloadSpec& offload) {
  int64_t bits = offload.layer_input, bit = 2;
  for (const auto& [name, field] : kRecomputeNames) {
    if (offload.tensors.*field) bits += bit;
    bit *= 2;
  }
  return bits;
}

// The names of memory.recompute that the part has tensors for.
int64_t recompute_bits(const EngineSpec& spec, const StageSpec& stage, const PartUses& uses) {
  int64_t bits = 0, bit = 1;
  const RecomputeSpec own = recompute_of(spec, stage);
  for (const auto& [name, field] : kRecomputeNames) {
    const bool is_of_experts = field == &RecomputeSpec::expert_up || field == &RecomputeSpec::shared_expert;
    const bool is_of_dense = field == &RecomputeSpec::mlp;
    const bool has_it = is_of_experts ? uses.experts : is_of_dense ? uses.dense : uses.attention;
    if (own.*field && has_it) bits += bit;
    bit *= 2;
  }
  // All ranks count the rows that some layer keeps.
  const StageSpec whole{.num_layers = spec.model.num_layers, .num_mtp = spec.model.num_mtp_layers};
  const bool counts = uses.experts || uses.window;
  if (counts && moe_layers_that_keep(spec.model, whole, whole.num_mtp, spec.recompute) > 0) bits += bit;
  return bits;
}

}  // namespace

RecomputeSpec recompute_of(const EngineSpec& spec, const StageSpec& stage) {
  return spec.recompute.of(stage.num_layers > 0 ? stage.first_layer : spec.model.num_layers);
}

PartUses uses_of(const EngineSpec& spec, const StageSpec& stage) {
  const ModelSpec& m = spec.model;
  const bool is_layer = stage.num_layers > 0, is_moe = is_layer && m.is_moe_layer(stage.first_layer);
  return {.attention = is_layer || stage.num_mtp > 0,
          .experts = is_moe || stage.num_mtp > 0,
          .dense = (is_layer && !is_moe) || stage.num_mtp > 0,
          .window = spec.dispatcher == DispatcherKind::direct || spec.dispatcher == DispatcherKind::two_level ||
                    spec.expert_rows > 0};
}

namespace {

// The axes over which weights that a pass quantises are sharded.
int64_t sharded_bits(const EngineSpec& spec) {
  int64_t bits = 0, bit = 1;
  for (const Axis axis : kGradAxes) {
    const bool quantises = spec.fsdp && spec.precision.recipe != PrecisionRecipe::none;
    if (quantises && group_size(spec.mesh, axis) > 1) bits += bit;
    bit *= 2;
  }
  return bits;
}

}  // namespace

size_t PartKeyHash::operator()(const PartKey& key) const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over integers in place of bytes
  for (const int64_t value : key) hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
  return static_cast<size_t>(hash ^ hash >> 32);
}

PartKey part_key(const EngineSpec& spec, const StageSpec& stage, size_t policy, bool splits) {
  const MeshShape& m = spec.mesh;
  const BatchShape& b = spec.shape;
  const PartUses uses = uses_of(spec, stage);
  const bool shares_experts = uses.experts || uses.window;
  const auto if_used = [](bool is_used, auto value) { return is_used ? static_cast<int64_t>(value) : -1; };
  return {static_cast<int64_t>(policy),
          stage.embedding,
          stage.first_layer,
          stage.num_layers,
          stage.norm,
          stage.num_mtp,
          stage.loss,
          m.tp,
          m.cp,
          2 * m.tp_overlap + m.cp_overlap,
          if_used(shares_experts, m.etp),
          if_used(shares_experts, m.ep),
          m.ranks_per_node,
          if_used(shares_experts, spec.dispatcher),
          if_used(shares_experts, spec.expert_overlap),
          b.batch,
          b.seq,
          b.max_segments,
          b.documents,
          if_used(uses.attention, b.cp_comm),
          if_used(uses.attention, b.cp_comm_window),
          if_used(uses.attention, m.cp_inner),
          b.num_mtp,
          static_cast<int64_t>(spec.target),
          2 * static_cast<int64_t>(spec.kernels) + spec.counts_for_hopper,
          spec.threads,
          std::bit_cast<int64_t>(spec.expert_rows),
          spec.optimizer ? 2 * static_cast<int64_t>(spec.optimizer->grad) + spec.optimizer->fuse_grad : -1,
          spec.optimizer ? static_cast<int64_t>(spec.optimizer->kind) : -1,
          spec.fusion,
          recompute_bits(spec, stage, uses),
          offload_bits(spec.offload),
          sharded_bits(spec),
          spec.optimizer && spec.optimizer->qk_clip > 0,
          splits};
}

}  // namespace moebius
