#include "comm/mesh.h"

#include "comm/gpu/gpu_links.h"

namespace moebius {
namespace {

// Hidden states go from stage to stage, and keys from rank to rank.
// Buckets of gradients and weights travel while the GPU computes.
NcclUse use_of(Axis axis) {
  return {.neighbours = axis == Axis::pp || axis == Axis::pp_back || axis == Axis::cp || axis == Axis::cp_outer,
          .overlapped = axis == Axis::dp_cp || axis == Axis::tp_cp_dp || axis == Axis::edp || axis == Axis::etp_edp};
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
    return links ? links->make_group(name, std::move(ranks), use_of(axis))
                 : transport.make_group(name, std::move(ranks));
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
}

Group& Mesh::cp_block(int64_t size) const {
  if (size == shape_.cp) return group(Axis::cp);
  for (const auto& block : cp_blocks_) {
    if (block->size() == size) return *block;
  }
  MOEBIUS_ASSERT(false);
  return group(Axis::cp);
}

int64_t Mesh::sent_bytes(Axis axis) const {
  int64_t bytes = group(axis).sent_bytes();
  if (axis != Axis::cp) return bytes;
  for (const auto& block : cp_blocks_) bytes += block->sent_bytes();
  return bytes;
}

double Mesh::seconds(Axis axis) const {
  double seconds = group(axis).seconds();
  if (axis != Axis::cp) return seconds;
  for (const auto& block : cp_blocks_) seconds += block->seconds();
  return seconds;
}

}  // namespace moebius
