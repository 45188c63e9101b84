#include "comm/mesh.h"

#include <algorithm>
#include <numeric>

#include "comm/gpu/gpu_links.h"

namespace moebius {
namespace {

// Returns the axis of all ranks that share the experts of a layer.
Axis axis_of_experts(const MeshShape& shape) { return shape.etp == 1 ? Axis::ep : Axis::etp_ep; }

// Hidden states go from stage to stage, and keys from rank to rank.
// Buckets of gradients and weights are exchanged while the GPU computes, and rows beside products of their layer.
NcclUse use_of(const MeshShape& shape, Axis axis) {
  return {.neighbours = axis == Axis::pp || axis == Axis::pp_back || axis == Axis::cp || axis == Axis::cp_outer,
          .overlapped = axis == Axis::dp_cp || axis == Axis::tp_cp_dp || axis == Axis::edp || axis == Axis::etp_edp,
          .few_blocks = (axis == Axis::tp && shape.tp_overlap) || (axis == Axis::cp && shape.cp_overlap),
          .node = static_cast<int>(ranks_on_node(shape, axis))};
}

}  // namespace

Mesh::Mesh(const MeshShape& shape) : self_(make_self_transport()), shape_(shape) {
  shape.check();
  MOEBIUS_CHECK(
      usage, shape.world() == 1,
      "mesh: a single rank must have tp*cp*dp*pp = 1; got {}*{}*{}*{} = {}; set every degree of [parallel] to 1, or "
      "start as many ranks",
      shape.tp, shape.cp, shape.dp, shape.pp, shape.world());
  make_groups(*self_, nullptr);
}

Mesh::Mesh(const MeshShape& shape, Transport& transport, GpuLinks* links) : shape_(shape) {
  shape.check();
  MOEBIUS_CHECK(usage, shape.world() == transport.size(),
                "mesh: tp*cp*dp*pp = {}*{}*{}*{} = {} must equal the number of ranks; got {}", shape.tp, shape.cp,
                shape.dp, shape.pp, shape.world(), counted(transport.size(), "rank"));
  place_ = place_of(shape, transport.rank());
  make_groups(transport, links);
}

void Mesh::make_groups(Transport& transport, GpuLinks* links) {
  const auto make = [&](const std::string& name, std::vector<int> ranks, Axis axis) {
    const NcclUse use = use_of(shape_, axis);
    return links ? links->make_group(name, std::move(ranks), use)
                 : transport.make_group(name, std::move(ranks), use.node);
  };
  for (int i = 0; i < kNumAxes; ++i) {
    const Axis axis = static_cast<Axis>(i);
    groups_[i] = make(std::string(name_of(axis)), ranks_of_group(shape_, axis, transport.rank()), axis);
  }
  for (int64_t size = 2; shape_.cp_dynamic && size < shape_.cp; size *= 2) {
    MeshShape blocks = shape_;
    blocks.cp_inner = size;
    cp_blocks_.push_back(
        make(fmt::format("cp_{}", size), ranks_of_group(blocks, Axis::cp_inner, transport.rank()), Axis::cp));
  }
  for (size_t i = 0; i < kGradAxes.size(); ++i) {
    const Axis axis = kGradAxes[i];
    const int64_t size = shard_size(shape_, axis);
    if (size == group_size(shape_, axis)) continue;
    const auto first = group(axis).ranks().begin() + group(axis).rank() / size * size;
    shard_groups_[i] = make(fmt::format("{}_shard", name_of(axis)), {first, first + size}, axis);
  }
  make_node(transport);
}

// The group carries host memory, so that it costs nothing if no dispatcher uses it.
void Mesh::make_node(Transport& transport) {
  if (shape_.nodes_of_experts() == 1) return;
  std::vector<int> ranks(static_cast<size_t>(shape_.ranks_per_node));
  std::iota(ranks.begin(), ranks.end(), transport.rank() / static_cast<int>(ranks.size()) * std::ssize(ranks));
  node_of_experts_ = transport.make_group(fmt::format("{}_node", name_of(axis_of_experts(shape_))), std::move(ranks));
}

Group& Mesh::cp_block(int64_t size) const {
  if (size == shape_.cp) return group(Axis::cp);
  for (const auto& block : cp_blocks_) {
    if (block->size() == size) return *block;
  }
  MOEBIUS_ASSERT(false);
  return group(Axis::cp);
}

Group& Mesh::shard_group(Axis grad_axis) const {
  const auto* at = std::find(kGradAxes.begin(), kGradAxes.end(), grad_axis);
  MOEBIUS_ASSERT(at != kGradAxes.end());
  const auto& block = shard_groups_[static_cast<size_t>(at - kGradAxes.begin())];
  return block ? *block : group(grad_axis);
}

template <class Body>
void Mesh::for_parts(Axis axis, Body&& body) const {
  if (axis == axis_of_experts(shape_) && node_of_experts_) body(*node_of_experts_);
  if (axis == Axis::cp)
    for (const auto& block : cp_blocks_) body(*block);
  for (size_t i = 0; i < kGradAxes.size(); ++i)
    if (axis == kGradAxes[i] && shard_groups_[i]) body(*shard_groups_[i]);
}

int64_t Mesh::sent_bytes(Axis axis) const {
  int64_t bytes = group(axis).sent_bytes();
  for_parts(axis, [&](const Group& part) { bytes += part.sent_bytes(); });
  return bytes;
}

double Mesh::seconds(Axis axis) const {
  double seconds = group(axis).seconds();
  for_parts(axis, [&](const Group& part) { seconds += part.seconds(); });
  return seconds;
}

}  // namespace moebius
