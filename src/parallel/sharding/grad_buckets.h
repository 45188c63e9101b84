// Which rank keeps what of the parameters (ZeRO-1, arXiv 1910.02054).
//
// The trainable parameters that share a reduction axis and a dtype are a chain; a chain is cut into buckets of whole
// parameters, from the last declared to the first, as their gradients appear. A bucket is one piece of memory in both
// of its lives, weights and gradients. Of the n ranks of the axis rank r owns the r-th n-th of it: it gets the sum of
// the gradients there, updates the weights there, and gives them to the others.
#pragma once

#include <vector>

#include "comm/mesh.h"
#include "model/params.h"

namespace moebius {

struct GradBucket {
  Group* group = nullptr;  // over which it is reduced and sharded
  std::vector<const Param*> params;
  std::vector<size_t> indices;  // of these in their table
  int64_t numel = 0;            // free places included, a multiple of the group's size
  ElementRange own;             // this rank's share
  Tensor weights() const;       // [numel], once bound
  Tensor gradients() const;
};

class GradBuckets {
 public:
  // A bucket is closed when it has so many elements: small enough that the first is on its way early in the backward
  // pass, large enough that messages are not dominated by their latency.
  static constexpr int64_t kBucketNumel = int64_t{1} << 22;

  // Places the parameters in memory, and says in each what this rank owns. Before the plan is bound.
  GradBuckets(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, int64_t bucket_numel = kBucketNumel);

  const std::vector<GradBucket>& all() const { return buckets_; }
  int bucket_of(size_t param) const { return bucket_of_[param]; }  // index of the parameter in its table; -1: none

 private:
  void cut(const ParamTable& params, const Mesh& mesh, int64_t bucket_numel);
  void place(GradBucket& bucket, ParamTable& params, MemoryPlan& plan) const;

  std::vector<GradBucket> buckets_;
  std::vector<int> bucket_of_;
};

}  // namespace moebius
