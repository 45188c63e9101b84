// The groups of one rank by axis name, in both views of the ranks (comm/layout.h).
#pragma once

#include "comm/layout.h"
#include "comm/transport/transport.h"

namespace moebius {

class GpuLinks;

class Mesh {
 public:
  // The mesh of one rank. Error{usage} when the shape has more.
  explicit Mesh(const MeshShape& shape);
  // This rank's part of the mesh over the ranks of a world, one group for each axis; groups with the same ranks stay
  // apart, so that what one axis sends is counted and reported under its name. The transport outlives the mesh. All
  // ranks make it, with the same shape. Error{usage} when the shape does not check, or has not the world's size.
  // links: how its groups move memory of GPUs, none where they do not; outlives the mesh.
  Mesh(const MeshShape& shape, Transport& transport, GpuLinks* links = nullptr);

  const MeshShape& shape() const { return shape_; }
  const RankPlace& place() const { return place_; }
  Group& group(Axis axis) const { return *groups_[static_cast<int>(axis)]; }

 private:
  void make_groups(Transport& transport, GpuLinks* links);

  std::unique_ptr<Transport> self_;  // of the mesh of one rank
  MeshShape shape_;
  RankPlace place_;
  std::array<std::unique_ptr<Group>, kNumAxes> groups_;
};

}  // namespace moebius
