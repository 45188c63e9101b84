// A Mesh holds the groups of one rank by axis, in both views of the ranks (comm/layout.h).
#pragma once

#include "comm/layout.h"
#include "comm/transport/transport.h"

namespace moebius {

class GpuLinks;

class Mesh {
 public:
  // The mesh of a single rank. Throws Error{usage} when the shape has more ranks.
  explicit Mesh(const MeshShape& shape);
  // This rank's part of the mesh of a world, with one group for each axis. All ranks construct it together, with the
  // same shape. Axes with the same ranks have separate groups, so that traffic is counted by axis. The transport must
  // outlive the mesh. links: makes the groups for GPU memory, and must outlive the mesh; null on CPUs. Throws
  // Error{usage} when the shape is invalid or does not have the world's size.
  Mesh(const MeshShape& shape, Transport& transport, GpuLinks* links = nullptr);

  const MeshShape& shape() const { return shape_; }
  const RankPlace& place() const { return place_; }
  Group& group(Axis axis) const { return *groups_[static_cast<int>(axis)]; }
  // Returns the block of `size` consecutive cp ranks that this rank is in.
  // REQUIRES: shape().cp_dynamic; size is a power of two from 2 to cp.
  Group& cp_block(int64_t size) const;
  // Returns the group of the ranks of etp x ep that are on this rank's node; it carries CPU memory alone.
  // REQUIRES: shape().nodes_of_experts() > 1.
  Group& node_of_experts() const { return *node_of_experts_; }
  // Returns the block of shard_size() consecutive ranks of group(grad_axis) that this rank is in. It is that group
  // itself if the block has all of its ranks. REQUIRES: grad_axis is one of kGradAxes.
  Group& shard_group(Axis grad_axis) const;
  // Return the bytes sent, and the seconds waited, in the groups of an axis. cp includes its blocks. The axis of the
  // ranks that share experts (etp_ep, or ep if etp = 1) includes the node. Those of kGradAxes include shard_group().
  int64_t sent_bytes(Axis axis) const;
  double seconds(Axis axis) const;

 private:
  void make_groups(Transport& transport, GpuLinks* links);
  void make_node(Transport& transport);
  // Calls body(group) for the groups whose traffic counts as that of an axis, except group(axis).
  template <class Body>
  void for_parts(Axis axis, Body&& body) const;

  std::unique_ptr<Transport> self_;  // only in the mesh of a single rank
  MeshShape shape_;
  RankPlace place_;
  std::array<std::unique_ptr<Group>, kNumAxes> groups_;
  std::vector<std::unique_ptr<Group>> cp_blocks_;                      // [i]: the block of 2^(i + 1) ranks
  std::unique_ptr<Group> node_of_experts_;                             // null: shape_.nodes_of_experts() is 1
  std::array<std::unique_ptr<Group>, kGradAxes.size()> shard_groups_;  // null: the block is the whole group
};

}  // namespace moebius
