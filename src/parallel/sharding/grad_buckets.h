// The share of the parameters that each rank owns (ZeRO-1, arXiv 1910.02054).
//
// The trainable parameters that share a reduction axis and their dtypes are a chain. A chain is cut into
// buckets of whole parameters, from the last declared to the first, the order in which their
// gradients appear. The weights of a bucket are contiguous in memory, and so are its gradients.
// Rank r of the n ranks of the axis owns the r-th of n equal shares of the bucket. It receives the
// sum of those gradients, updates those weights, and sends them to the others.
#pragma once

#include <vector>

#include "comm/mesh.h"
#include "model/params.h"

namespace moebius {

struct GradBucket {
  Group* group = nullptr;  // the ranks over which it is reduced and sharded
  std::vector<const Param*> params;
  std::vector<size_t> indices;  // of the parameters in their table
  int64_t numel = 0;            // with padding, a multiple of the group's size
  ElementRange own;             // this rank's share
  Tensor weights() const;       // [numel], once bound
  Tensor gradients() const;
  bool is_quantised() const { return params.front()->is_quantised(); }
};

class GradBuckets {
 public:
  // Places the parameters in memory and makes this rank the owner of its share of each. A bucket is
  // closed when it has bucket_numel elements. Called before the plan is bound.
  GradBuckets(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, int64_t bucket_numel);

  const std::vector<GradBucket>& all() const { return buckets_; }
  // The index of the bucket that holds a parameter, by its index in the table; -1: none.
  int bucket_of(size_t param) const { return bucket_of_[param]; }

 private:
  void cut(const ParamTable& params, const Mesh& mesh, int64_t bucket_numel);
  void place(GradBucket& bucket, ParamTable& params, MemoryPlan& plan) const;

  std::vector<GradBucket> buckets_;
  std::vector<int> bucket_of_;
};

}  // namespace moebius
