// The share of the parameters that each rank owns (ZeRO-1, arXiv 1910.02054).
//
// The trainable parameters that share a reduction axis and their dtypes are a chain. A chain is cut into
// buckets of whole parameters, from the last declared to the first, the order in which their
// gradients appear. The weights of a bucket are contiguous in memory, and so are its gradients.
// Rank r of the n ranks of the axis owns the r-th of n equal shares of the bucket. It receives the
// sum of those gradients, updates those weights, and sends them to the others.
//
// Tables of a vocabulary that tp does not divide are in a chain of their own. Their shards have different sizes on the
// ranks of tp. So all these ranks own the same elements of all other parameters, as Muon expects.
//
// With sharded weights or gradients a bucket has parameters of one layer alone, all those of its chain. Sharded tensors
// are not in the plan: the bucket declares this rank's share of them.
//
// Sharded weights include the frozen ones of layers, in buckets of their own. These have no gradients, no masters and
// no update: the owner of a share keeps it and sends it.
//
// With weights on the host the weights of layers are sharded in the same way, also those that one rank alone holds: its
// share is then all of them. Shares are in host memory.
#pragma once

#include <vector>

#include "comm/mesh.h"
#include "model/params.h"
#include "parallel/sharding/sharding.h"

namespace moebius {

struct GradBucket {
  Group* group = nullptr;  // the ranks over which it is reduced and sharded
  std::vector<const Param*> params;
  std::vector<size_t> indices;  // indices of the parameters in their table
  int64_t numel = 0;            // with padding, a multiple of the group's size
  ElementRange own;             // this rank's share
  int layer = -1;               // Param::layer of all of them, if a bucket has one layer alone; else -1
  bool is_frozen = false;       // true if all of them are frozen
  Tensor weight_share;          // [own.count] in the dtype of the weights: all that this rank keeps of them, or empty
  Tensor gradient_share;        // [own.count], the same of the gradients, in the dtype of their sums
  bool gradients_on_host = false;  // gradient_share is in host memory
  // With parallel.fsdp_shard: the ranks that gather weights from each other in all passes of a step but the first, and
  // this rank's shard for them, [numel / shard_group->size()]. Empty: these are `group` and weight_share.
  Group* shard_group = nullptr;
  Tensor weight_shard;
  bool shards_weights() const { return !weight_share.empty(); }
  bool shards_gradients() const { return !gradient_share.empty(); }
  // These two are for tensors that are not sharded.
  Tensor weights() const;  // [numel], once bound
  Tensor gradients() const;
  // Calls body(index in the table, address) for each parameter's part of a tensor of all of them, [numel]. The address
  // is null where the tensor has no memory.
  template <class Body>
  void for_params(const Tensor& all, Body&& body) const {
    int64_t offset = 0;
    for (size_t k = 0; k < params.size(); ++k) {
      body(indices[k], all.rows(offset, offset + params[k]->w.numel()).data);
      offset += div_ceil(params[k]->w.numel(), MemoryPlan::kAlign) * MemoryPlan::kAlign;
    }
  }
  bool is_quantised() const { return params.front()->is_quantised(); }
};

class GradBuckets {
 public:
  // Places the parameters in memory and makes this rank the owner of its share of each. A bucket of several layers is
  // closed when it has bucket_numel elements. Called before the plan is bound.
  GradBuckets(ParamTable& params, const Mesh& mesh, MemoryPlan& plan, const ShardingSpec& spec);
  GradBuckets(const GradBuckets&) = delete;  // parameters refer to shares

  const std::vector<GradBucket>& all() const { return buckets_; }  // of trained parameters
  // Returns those that shard their weights, of trained and of frozen parameters.
  std::vector<const GradBucket*> with_sharded_weights() const;
  // Returns the index of the bucket that holds a parameter, by its index in the table; -1: none.
  int bucket_of(size_t param) const { return bucket_of_[param]; }

 private:
  void cut(const ParamTable& params, const Mesh& mesh, const ShardingSpec& spec);
  void cut_frozen(const ParamTable& params, const Mesh& mesh, const ShardingSpec& spec);
  void place(GradBucket& bucket, ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
             const ShardingSpec& spec) const;

  std::vector<GradBucket> buckets_, frozen_;
  std::vector<int> bucket_of_;
};

}  // namespace moebius
