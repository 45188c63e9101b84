#include "comm/mesh.h"

namespace moebius {

Mesh::Mesh(const MeshShape& shape) : self_(make_self_transport()), shape_(shape) {
  shape.check();
  MOEBIUS_CHECK(
      usage, shape.world() == 1,
      "mesh: this version runs on one rank; got tp*cp*dp*pp = {}*{}*{}*{} = {}; set every degree of [parallel] to 1",
      shape.tp, shape.cp, shape.dp, shape.pp, shape.world());
  make_groups(*self_);
}

Mesh::Mesh(const MeshShape& shape, Transport& transport) : shape_(shape) {
  shape.check();
  MOEBIUS_CHECK(usage, shape.world() == transport.size(),
                "mesh: tp*cp*dp*pp = {}*{}*{}*{} = {} must equal the number of ranks; got {} ranks", shape.tp, shape.cp,
                shape.dp, shape.pp, shape.world(), transport.size());
  place_ = place_of(shape, transport.rank());
  make_groups(transport);
}

void Mesh::make_groups(Transport& transport) {
  for (int i = 0; i < kNumAxes; ++i) {
    const Axis axis = static_cast<Axis>(i);
    groups_[i] = transport.make_group(std::string(name_of(axis)), ranks_of_group(shape_, axis, transport.rank()));
  }
}

}  // namespace moebius
