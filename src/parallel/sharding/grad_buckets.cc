#include "parallel/sharding/grad_buckets.h"

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

GradBuckets::GradBuckets(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, int64_t bucket_numel)
    : bucket_of_(params.all().size(), -1) {
  cut(params, mesh, bucket_numel);
  for (GradBucket& bucket : buckets_) place(bucket, params, plan);
}

void GradBuckets::cut(const ParamTable& params, const Mesh& mesh, int64_t bucket_numel) {
  std::map<std::tuple<Axis, DType, DType>, size_t> open;
  for (size_t i = params.all().size(); i-- > 0;) {
    const Param& p = params.all()[i];
    if (!p.has_grad) continue;
    const auto [found, is_new] = open.try_emplace({p.spec.grad_axis, p.w.dtype, p.grad().dtype}, buckets_.size());
    if (is_new) buckets_.push_back({.group = &mesh.group(p.spec.grad_axis)});
    GradBucket& bucket = buckets_[found->second];
    bucket_of_[i] = static_cast<int>(found->second);
    bucket.params.push_back(&p);
    bucket.indices.push_back(i);
    bucket.numel += p.w.numel();
    if (bucket.numel >= bucket_numel) open.erase(found);
  }
}

void GradBuckets::place(GradBucket& bucket, ParamTable& params, MemoryPlan& plan) const {
  const int64_t multiple = multiple_of(*bucket.group);
  bucket.numel = MemoryPlan::joined_numel(views_of(bucket, &Param::w), multiple);
  plan.join(views_of(bucket, &Param::w), multiple);
  plan.join(views_of(bucket, bucket.params.front()->sums_apart() ? &Param::grad_sum : &Param::dw), multiple);
  const int64_t share = bucket.numel / bucket.group->size();
  bucket.own = {.begin = share * bucket.group->rank(), .count = share};
  int64_t offset = 0;
  for (size_t k = 0; k < bucket.params.size(); ++k) {
    const int64_t n = bucket.params[k]->w.numel();
    ElementRange owned = common(bucket.own, {.begin = offset, .count = n});
    owned.begin = owned.count > 0 ? owned.begin - offset : 0;
    params.own(bucket.indices[k], owned);
    offset += div_ceil(n, MemoryPlan::kAlign) * MemoryPlan::kAlign;
  }
}

}  // namespace moebius
