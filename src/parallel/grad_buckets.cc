#include "parallel/grad_buckets.h"

#include <map>

namespace moebius {
namespace {

// A shard begins where memory is aligned as at the start of a tensor.
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
Tensor GradBucket::gradients() const { return joined(params.front()->dw, numel); }

GradBuckets::GradBuckets(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, int64_t bucket_numel) {
  std::map<std::pair<Axis, DType>, size_t> open;
  std::map<const Param*, size_t> index;
  const auto& all = params.all();
  for (size_t i = all.size(); i-- > 0;) {
    const Param& p = all[i];
    if (!p.has_grad) continue;
    index[&p] = i;
    const auto [found, is_new] = open.try_emplace({p.spec.grad_axis, p.spec.dtype}, buckets_.size());
    if (is_new) buckets_.push_back({.group = &mesh.group(p.spec.grad_axis)});
    GradBucket& bucket = buckets_[found->second];
    bucket.params.push_back(&p);
    bucket.numel += p.w.numel();
    if (bucket.numel >= bucket_numel) open.erase(found);
  }
  for (GradBucket& bucket : buckets_) {
    const int64_t multiple = multiple_of(*bucket.group);
    bucket.numel = MemoryPlan::joined_numel(views_of(bucket, &Param::w), multiple);
    plan.join(views_of(bucket, &Param::w), multiple);
    plan.join(views_of(bucket, &Param::dw), multiple);
    const int64_t share = bucket.numel / bucket.group->size();
    bucket.own = {.begin = share * bucket.group->rank(), .count = share};
    int64_t offset = 0;
    for (const Param* p : bucket.params) {
      ElementRange owned = common(bucket.own, {.begin = offset, .count = p->w.numel()});
      owned.begin = owned.count > 0 ? owned.begin - offset : 0;
      params.own(index.at(p), owned);
      offset += div_ceil(p->w.numel(), MemoryPlan::kAlign) * MemoryPlan::kAlign;
    }
  }
}

void GradBuckets::reduce(Stream& s) const {
  for (const GradBucket& bucket : buckets_) {
    if (bucket.group->size() == 1) continue;
    const Tensor all = bucket.gradients();
    bucket.group->reduce_scatter_sum(s, all.rows(bucket.own.begin, bucket.own.end()), all);
  }
}

void GradBuckets::gather(Stream& s) const {
  for (const GradBucket& bucket : buckets_) {
    if (bucket.group->size() == 1) continue;
    const Tensor all = bucket.weights();
    bucket.group->all_gather(s, all, all.rows(bucket.own.begin, bucket.own.end()));
  }
}

}  // namespace moebius
