// The parameters of a rank in the order of the engine's declarations, and the buckets that they are reduced and
// gathered in, as GradBuckets cuts them (parallel/sharding/grad_buckets.h). No engine is built.
#pragma once

#include <algorithm>
#include <vector>

#include "plan/layout.h"
#include "plan/part.h"

namespace moebius {

struct HeldParam {
  const ParamSize* size = nullptr;
  int64_t layer = -1;  // index among the rank's layers; -1: not in a layer
  const ParamSize* operator->() const { return size; }
  bool is_frozen() const { return !size->has_grad && size->kind != ParamKind::state; }
};

// A bucket of parameters that are reduced together, or of frozen ones that are gathered together.
struct ParamBucket {
  Axis axis = Axis::dp_cp;
  DType dtype = DType::bf16;
  bool sums_apart = false;
  int64_t layer = -1;           // HeldParam::layer of all of them, if each layer has its own buckets
  bool uneven = false;          // tables of a vocabulary that tp does not divide
  bool shards_weights = false;  // a rank keeps only its share of the weights, apart
  bool shards_gradients = false;
  std::vector<HeldParam> params;
  int64_t sum = 0, numel = 0;  // numel: with padding
  DType grad() const { return sums_apart ? DType::bf16 : DType::f32; }
};

// Returns the bytes that a rank sends to sum a bucket's gradients over the ranks.
double gradient_wire_bytes(const EngineSpec& spec, const ParamBucket& bucket);

// Returns ceil(numel / kAlign) * kAlign.
int64_t aligned_numel(int64_t numel);

// The parameters of a rank, and their buckets.
struct RankHeld {
  std::vector<HeldParam> params;
  std::vector<ParamBucket> trained, frozen;  // buckets_of(), frozen_buckets_of()
};
RankHeld held_by(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);
// Returns whether a rank keeps its share of the weights of layers apart: they are sharded over the axis, or on
// the host.
bool shards_weights(const EngineSpec& spec, Axis axis);
// Returns whether a parameter is frozen and its rank keeps only a share of it.
bool is_sharded_frozen(const EngineSpec& spec, const HeldParam& p);
std::vector<ParamBucket> buckets_of(const EngineSpec& spec, const std::vector<HeldParam>& params);
// Returns those of frozen weights that are sharded.
std::vector<ParamBucket> frozen_buckets_of(const EngineSpec& spec, const std::vector<HeldParam>& params);

// Returns the world rank whose memory is counted, the same as in `moebius config`.
RankPlace counted_place(const EngineSpec& spec, int64_t pp_rank);
int64_t rank_in_group(const EngineSpec& spec, const RankPlace& place, Axis axis);

// Calls body(parameter, first, count) with the elements of each parameter that are in this rank's share of a bucket.
template <class Body>
void for_owned(const EngineSpec& spec, const RankPlace& place, const ParamBucket& bucket, Body&& body) {
  const int64_t share = bucket.numel / group_size(spec.mesh, bucket.axis);
  const int64_t begin = share * rank_in_group(spec, place, bucket.axis), end = begin + share;
  int64_t offset = 0;
  for (const HeldParam& p : bucket.params) {
    const int64_t first = std::max(begin, offset);
    body(*p.size, first - offset, std::max<int64_t>(0, std::min(end, offset + p->numel) - first));
    offset += aligned_numel(p->numel);
  }
}

}  // namespace moebius
