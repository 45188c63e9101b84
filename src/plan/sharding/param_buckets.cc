#include "plan/sharding/param_buckets.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "comm/group_cost.h"

namespace moebius {
namespace {

void add(ParamBucket& bucket, const HeldParam& p) {
  bucket.params.push_back(p);
  bucket.sum += p->numel;
  bucket.numel += aligned_numel(p->numel);
}

void pad(const EngineSpec& spec, std::vector<ParamBucket>& buckets) {
  for (ParamBucket& b : buckets) {
    const int64_t multiple = MemoryPlan::kAlign * group_size(spec.mesh, b.axis);
    b.numel = div_ceil(b.numel, multiple) * multiple;
  }
}

// Returns the parameters of a rank. The embedding is declared before the layers, and the norm and the head after them.
std::vector<HeldParam> params_of(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  std::vector<HeldParam> all;
  int64_t layer = 0;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    const PartWork& ends = parts.ends(stage);
    const size_t before = stage.embedding ? 1 : 0;
    for (size_t i = 0; i < before; ++i) all.push_back({&ends.params[i]});
    for (int64_t i = 0; i < stage.num_layers; ++i, ++layer)
      for (const ParamSize& p : parts.layer(stage.first_layer + i).params) all.push_back({&p, layer});
    for (size_t i = before; i < ends.params.size(); ++i) all.push_back({&ends.params[i]});
  }
  return all;
}

}  // namespace

double gradient_wire_bytes(const EngineSpec& spec, const ParamBucket& bucket) {
  // NCCL's own sums of bf16 send bf16. Sums over levels send f32 between them.
  const DType dtype = spec.sums == GpuSums::nccl ? DType::f32 : bucket.grad();
  const auto bytes = static_cast<double>(size_of(bucket.grad()) * bucket.numel);
  const auto on_node = static_cast<int>(ranks_on_node(spec.mesh, bucket.axis));
  return reduce_scatter_cost(bytes, group_size(spec.mesh, bucket.axis), dtype, on_node).wire_bytes;
}

int64_t aligned_numel(int64_t numel) { return div_ceil(numel, MemoryPlan::kAlign) * MemoryPlan::kAlign; }

bool shards_weights(const EngineSpec& spec, Axis axis) {
  return spec.offload_weights || (spec.fsdp && group_size(spec.mesh, axis) > 1);
}

bool is_sharded_frozen(const EngineSpec& spec, const HeldParam& p) {
  return p.layer >= 0 && p.is_frozen() && shards_weights(spec, p->axis);
}

std::vector<ParamBucket> buckets_of(const EngineSpec& spec, const std::vector<HeldParam>& params) {
  const bool by_layer = spec.fsdp || spec.shard_gradients || spec.offload_weights;
  const bool is_uneven = spec.model.vocab_size % spec.mesh.tp != 0;
  std::vector<ParamBucket> buckets;
  std::vector<size_t> open;  // of the buckets, one of each kind
  for (size_t i = params.size(); i-- > 0;) {
    const HeldParam& p = params[i];
    if (!p->has_grad) continue;
    const int64_t layer = by_layer ? p.layer : -1;
    const bool uneven = is_uneven && (p->kind == ParamKind::embedding || p->kind == ParamKind::head);
    const auto found = std::find_if(open.begin(), open.end(), [&](size_t b) {
      const ParamBucket& bucket = buckets[b];
      return bucket.layer == layer && bucket.axis == p->axis && bucket.dtype == p->dtype &&
             bucket.sums_apart == p->sums_apart && bucket.uneven == uneven;
    });
    const size_t at = found == open.end() ? buckets.size() : *found;
    if (found == open.end()) {
      // Parameters of a layer are neighbours, so the buckets of another one are whole.
      std::erase_if(open, [&](size_t b) { return buckets[b].layer >= 0 && buckets[b].layer != layer; });
      open.push_back(at);
      const bool is_shared = layer >= 0 && group_size(spec.mesh, p->axis) > 1;
      buckets.push_back({.axis = p->axis,
                         .dtype = p->dtype,
                         .sums_apart = p->sums_apart,
                         .layer = layer,
                         .uneven = uneven,
                         .shards_weights = layer >= 0 && shards_weights(spec, p->axis),
                         .shards_gradients = is_shared && spec.shard_gradients});
    }
    ParamBucket& bucket = buckets[at];
    add(bucket, p);
    if (layer < 0 && bucket.sum >= spec.bucket_numel) std::erase(open, at);
  }
  pad(spec, buckets);
  return buckets;
}

std::vector<ParamBucket> frozen_buckets_of(const EngineSpec& spec, const std::vector<HeldParam>& params) {
  std::vector<ParamBucket> buckets;
  std::map<std::tuple<Axis, DType, int64_t>, size_t> open;
  for (size_t i = params.size(); i-- > 0;) {
    const HeldParam& p = params[i];
    if (!is_sharded_frozen(spec, p)) continue;
    const auto [found, is_new] = open.try_emplace({p->axis, p->dtype, p.layer}, buckets.size());
    if (is_new) buckets.push_back({.axis = p->axis, .dtype = p->dtype, .layer = p.layer, .shards_weights = true});
    add(buckets[found->second], p);
  }
  pad(spec, buckets);
  return buckets;
}

RankHeld held_by(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  RankHeld held{.params = params_of(parts, layout, pp_rank)};
  held.trained = buckets_of(parts.spec(), held.params);
  held.frozen = frozen_buckets_of(parts.spec(), held.params);
  return held;
}

RankPlace counted_place(const EngineSpec& spec, int64_t pp_rank) {
  const bool uneven = spec.model.vocab_size % spec.mesh.tp != 0;
  const int rank = rank_in_dense_view(spec.mesh, {.tp = uneven ? spec.mesh.tp - 1 : 0, .pp = pp_rank});
  return place_of(spec.mesh, rank);
}

int64_t rank_in_group(const EngineSpec& spec, const RankPlace& p, Axis axis) {
  const MeshShape& m = spec.mesh;
  if (axis == Axis::edp) return p.edp;
  if (axis == Axis::etp_edp) return p.etp + m.etp * p.edp;
  const int64_t dp_cp = p.cp + m.cp * p.dp;
  return axis == Axis::dp_cp ? dp_cp : p.tp + m.tp * dp_cp;
}

}  // namespace moebius
