#include "parallel/sharding/grad_buckets.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace moebius {
namespace {

// A shard begins at an address that is aligned like the start of a tensor.
int64_t multiple_of(const Group& group) { return MemoryPlan::kAlign * group.size(); }

std::vector<const Tensor*> views_of(const GradBucket& bucket, Tensor Param::*view) {
  std::vector<const Tensor*> views;
  for (const Param* p : bucket.params) views.push_back(&(p->*view));
  return views;
}

Tensor joined(const Tensor& first, int64_t numel) {
  Tensor all = first;
  all.shape = {numel};
  return all;
}

}  // namespace

Tensor GradBucket::weights() const { return joined(params.front()->w, numel); }
Tensor GradBucket::gradients() const { return joined(params.front()->grad(), numel); }

GradBuckets::GradBuckets(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, const ShardingSpec& spec)
    : bucket_of_(params.all().size(), -1) {
  cut(params, mesh, spec);
  if (spec.shards_weights || spec.weights_on_host) cut_frozen(params, mesh, spec);
  for (std::vector<GradBucket>* buckets : {&buckets_, &frozen_})
    for (GradBucket& bucket : *buckets) place(bucket, params, mesh, plan, spec);
}

std::vector<const GradBucket*> GradBuckets::with_sharded_weights() const {
  std::vector<const GradBucket*> sharded;
  for (const std::vector<GradBucket>* buckets : {&buckets_, &frozen_})
    for (const GradBucket& bucket : *buckets)
      if (bucket.shards_weights()) sharded.push_back(&bucket);
  return sharded;
}

namespace {

void add(GradBucket& bucket, const Param& p, size_t index) {
  bucket.params.push_back(&p);
  bucket.indices.push_back(index);
  bucket.numel += p.w.numel();
}

// Returns whether the ranks of tp have shards of different sizes, as of a vocabulary that tp does not divide.
bool is_uneven(const Param& p, const Mesh& mesh) {
  if (p.spec.kind != ParamKind::embedding && p.spec.kind != ParamKind::head) return false;
  return std::any_of(p.spec.parts.begin(), p.spec.parts.end(), [&](const ParamPart& part) {
    return part.shard.dim >= 0 && part.shard.count * mesh.group(Axis::tp).size() != part.shape[part.shard.dim];
  });
}

}  // namespace

void GradBuckets::cut(const ParamTable& params, const Mesh& mesh, const ShardingSpec& spec) {
  const bool by_layer = spec.shards_weights || spec.shards_gradients || spec.weights_on_host;
  std::map<std::tuple<Axis, DType, DType, int, bool>, size_t> open;
  for (size_t i = params.all().size(); i-- > 0;) {
    const Param& p = params.all()[i];
    if (!p.has_grad) continue;
    const int layer = by_layer ? p.layer : -1;
    const auto [found, is_new] =
        open.try_emplace({p.spec.grad_axis, p.w.dtype, p.grad().dtype, layer, is_uneven(p, mesh)}, buckets_.size());
    if (is_new) buckets_.push_back({.group = &mesh.group(p.spec.grad_axis), .layer = layer});
    GradBucket& bucket = buckets_[found->second];
    bucket_of_[i] = static_cast<int>(found->second);
    add(bucket, p, i);
    if (layer < 0 && bucket.numel >= spec.bucket_numel) open.erase(found);
  }
}

// Shards the frozen weights of layers that other ranks have too, and with weights on the host all those of layers.
// Weights outside of layers remain whole, like trained ones.
void GradBuckets::cut_frozen(const ParamTable& params, const Mesh& mesh, const ShardingSpec& spec) {
  std::map<std::tuple<Axis, DType, int>, size_t> open;
  for (size_t i = params.all().size(); i-- > 0;) {
    const Param& p = params.all()[i];
    Group& group = mesh.group(p.spec.grad_axis);
    if (!p.frozen || p.layer < 0 || (group.size() == 1 && !spec.weights_on_host)) continue;
    const auto [found, is_new] = open.try_emplace({p.spec.grad_axis, p.w.dtype, p.layer}, frozen_.size());
    if (is_new) frozen_.push_back({.group = &group, .layer = p.layer, .is_frozen = true});
    add(frozen_[found->second], p, i);
  }
}

namespace {

void declare_shares(GradBucket& bucket, MemoryPlan& plan, const Mesh& mesh, Life life) {
  const Param& first = *bucket.params.front();
  plan.declare(bucket.weight_share, first.spec.name + ".share", {bucket.numel / bucket.group->size()}, first.w.dtype,
               life);
  bucket.shard_group = &mesh.shard_group(first.spec.grad_axis);
  if (bucket.shard_group == bucket.group) return;
  plan.declare(bucket.weight_shard, first.spec.name + ".shard", {bucket.numel / bucket.shard_group->size()},
               first.w.dtype, life);
}

}  // namespace

void GradBuckets::place(GradBucket& bucket, ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
                        const ShardingSpec& spec) const {
  const int64_t multiple = multiple_of(*bucket.group);
  const Param& first = *bucket.params.front();
  const bool is_shared = bucket.layer >= 0 && bucket.group->size() > 1;
  const bool is_on_host = bucket.layer >= 0 && spec.weights_on_host;
  bucket.numel = MemoryPlan::joined_numel(views_of(bucket, &Param::w), multiple);
  const int64_t share = bucket.numel / bucket.group->size();
  MOEBIUS_ASSERT(!is_on_host || !is_shared || spec.shards_weights);
  if (is_on_host || (is_shared && spec.shards_weights))
    declare_shares(bucket, plan, mesh, is_on_host ? Life::host : Life::param);
  else
    plan.join(views_of(bucket, &Param::w), multiple);
  const bool shards_gradients = is_shared && spec.shards_gradients && !bucket.is_frozen;
  bucket.gradients_on_host = shards_gradients && spec.gradients_on_host && first.sums_apart();
  if (shards_gradients)
    plan.declare(bucket.gradient_share, first.spec.name + ".grad_share", {share}, first.grad().dtype,
                 bucket.gradients_on_host ? Life::host : Life::grad);
  else if (!bucket.is_frozen)
    plan.join(views_of(bucket, first.sums_apart() ? &Param::grad_sum : &Param::dw), multiple);
  bucket.own = {.begin = share * bucket.group->rank(), .count = share};
  int64_t offset = 0;
  for (size_t k = 0; k < bucket.params.size(); ++k) {
    const int64_t n = bucket.params[k]->w.numel();
    ElementRange owned = common(bucket.own, {.begin = offset, .count = n});
    const int64_t in_share = owned.count > 0 ? owned.begin - bucket.own.begin : 0;
    owned.begin = owned.count > 0 ? owned.begin - offset : 0;
    params.own(bucket.indices[k], owned);
    if (bucket.shards_weights()) params.keep_owned_weights(bucket.indices[k], {&bucket.weight_share, in_share});
    if (bucket.shards_gradients()) params.keep_owned_gradient(bucket.indices[k], {&bucket.gradient_share, in_share});
    offset += div_ceil(n, MemoryPlan::kAlign) * MemoryPlan::kAlign;
  }
}

}  // namespace moebius
