#include "plan/search/part_times.h"

#include <algorithm>
#include <bit>

namespace moebius {
namespace {

// Returns whether the ranks of the axis depend on the number of replicas or stages, which no part depends on.
bool depends_on_replicas(Axis axis) {
  switch (axis) {
    case Axis::tp:
    case Axis::cp:
    case Axis::cp_inner:
    case Axis::cp_outer:
    case Axis::tp_cp:
    case Axis::etp:
    case Axis::ep:
    case Axis::etp_ep:
      return false;
    default:
      return true;
  }
}

bool sends_to_replicas(const PartWork& part) {
  const SimplerParts& of = part.simpler;
  if (of.experts) return sends_to_replicas(*of.experts) || sends_to_replicas(*of.attention);
  for (const PassWork* pass : {&part.forward, &part.loss, &part.backward, &part.first_backward, &part.copies})
    if (std::any_of(pass->sent.begin(), pass->sent.end(), [](const auto& s) { return depends_on_replicas(s.axis); }))
      return true;
  return false;
}

}  // namespace

PartTimes::Key PartTimes::key_of(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer) {
  const EngineSpec& spec = c.spec;
  const MeshShape& m = spec.mesh;
  const bool is_apart = sends_to_replicas(part), is_merged = c.assume.merged_overlap;
  return {std::bit_cast<int64_t>(&part),
          2 * int64_t{is_moe} + is_layer,
          2 * int64_t{spec.graph} + spec.overlap,
          static_cast<int64_t>(spec.dispatcher),
          static_cast<int64_t>(spec.expert_overlap),
          std::bit_cast<int64_t>(spec.balance.rank_rows_factor),
          m.tp,
          m.cp,
          m.cp_inner,
          m.ep,
          m.etp,
          m.ranks_per_node,
          is_apart || is_merged ? m.pp : int64_t{m.pp > 1},
          is_apart ? m.dp : 0,
          is_apart ? m.edp : 0,
          is_merged ? spec.num_micro_batches : 0,
          is_merged ? spec.pipeline.num_virtual : 0,
          spec.shape.batch,
          spec.shape.seq,
          spec.shape.num_mtp};
}

size_t PartTimes::Hash::operator()(const Key& key) const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over integers in place of bytes
  for (const int64_t value : key) hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
  return static_cast<size_t>(hash ^ hash >> 32);
}

// Two threads may time the same part, and the first one's time is kept.
const PartTime& PartTimes::of(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer) {
  const Key key = key_of(c, part, is_moe, is_layer);
  {
    const std::scoped_lock lock(mutex_);
    if (const auto found = times_.find(key); found != times_.end()) return *found->second;
  }
  auto made = std::make_unique<const PartTime>(part_time(c, part, is_moe, is_layer));
  const std::scoped_lock lock(mutex_);
  return *times_.try_emplace(key, std::move(made)).first->second;
}

}  // namespace moebius
