#include "comm/mesh.h"

namespace moebius {

std::string_view name_of(Axis axis) {
  constexpr std::string_view names[kNumAxes] = {"tp", "cp", "dp", "pp", "etp", "ep", "edp", "tp_cp", "dp_cp", "world"};
  return names[static_cast<int>(axis)];
}

Mesh::Mesh(const MeshShape& shape) : shape_(shape) {
  MOEBIUS_CHECK(usage, shape.world() == shape.etp * shape.ep * shape.edp * shape.pp,
                "mesh: tp*cp*dp*pp = {} must equal etp*ep*edp*pp = {}", shape.world(),
                shape.etp * shape.ep * shape.edp * shape.pp);
  MOEBIUS_CHECK(
      usage, shape.world() == 1,
      "mesh: this version runs on one rank; got tp*cp*dp*pp = {}*{}*{}*{} = {}; set every degree of [parallel] to 1",
      shape.tp, shape.cp, shape.dp, shape.pp, shape.world());
  const std::shared_ptr<Group> self = make_self_group();
  groups_.fill(self);
}

}  // namespace moebius
