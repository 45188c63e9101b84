#include "comm/mesh.h"

#include "comm/gpu/gpu_links.h"

namespace moebius {
namespace {

// Hidden states go from stage to stage, and keys from rank to rank.
// Buckets of gradients and weights travel while the GPU computes.
NcclUse use_of(Axis axis) {
  return {.neighbours = axis == Axis::pp || axis == Axis::pp_back || axis == Axis::cp,
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
  for (int i = 0; i < kNumAxes; ++i) {
    const Axis axis = static_cast<Axis>(i);
    const std::string name(name_of(axis));
    std::vector<int> ranks = ranks_of_group(shape_, axis, transport.rank());
    groups_[i] =
        links ? links->make_group(name, std::move(ranks), use_of(axis)) : transport.make_group(name, std::move(ranks));
  }
}

}  // namespace moebius
