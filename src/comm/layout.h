// The layout of ranks: two views of the same ranks (Parallel Folding, arXiv 2504.14960). The dense view (tp, cp, dp,
// pp) is for attention and everything else that is not an expert; the expert view (etp, ep, edp, pp) is for the
// experts. A pipeline stage has the same ranks in both views, and inside it ep may span tp, cp and dp.
//
//   world_rank = tp  + TP  (cp + CP (dp  + DP  pp))       the leftmost axis varies fastest
//              = etp + ETP (ep + EP (edp + EDP pp))
//
// cp may have two levels, cp = cp_inner + CP_INNER cp_outer: ranks with a fast interconnect, and groups of such ranks
// (hierarchical in model/attention/context_parallel.h).
//
// A node is a block of ranks_per_node consecutive ranks. The first node begins at rank 0 of the world. The ranks that
// share the experts of a layer (etp x ep) have consecutive numbers. Those of dp do not, if tp or cp is above 1.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

// The axes of groups. A group of an axis with several names, such as dp_cp, has the ranks that differ only in these
// coordinates. pp_back has the same ranks as pp: hidden states and their gradients are two streams of messages.
enum class Axis : int {
  tp,
  cp,
  dp,
  pp,
  pp_back,
  etp,
  ep,
  edp,
  tp_cp,
  dp_cp,
  tp_cp_dp,
  etp_ep,
  etp_edp,
  tp_pp,
  etp_ep_pp,
  cp_inner,
  cp_outer,
  world
};
inline constexpr int kNumAxes = 18;
std::string_view name_of(Axis axis);
// Returns the purpose of the groups of an axis, in a few words.
std::string_view purpose_of(Axis axis);

struct MeshShape {
  int64_t tp = 1, cp = 1, dp = 1, pp = 1, etp = 1, ep = 1, edp = 1;
  int64_t cp_inner = 1;     // ranks of a group of Axis::cp_inner
  bool cp_dynamic = false;  // blocks of 2, 4, ... consecutive cp ranks are groups too (Mesh::cp_block)
  // Exchanges of tp, or of cp, overlap with products in backward (model/attention/row_blocks.h).
  bool tp_overlap = false, cp_overlap = false;
  int64_t ranks_per_node = 8;
  int64_t fsdp_shard = 0;  // parallel.fsdp_shard: ranks over which the weights of a layer are sharded; 0: all
  int64_t cp_outer() const { return cp / cp_inner; }
  // Returns the number of nodes of the ranks of etp x ep, if these are all ranks of the nodes; else 1.
  int64_t nodes_of_experts() const { return etp * ep % ranks_per_node == 0 ? etp * ep / ranks_per_node : 1; }
  int64_t world() const { return tp * cp * dp * pp; }
  // Throws Error{usage} with the equation that fails, unless all of these hold:
  //   Every degree is at least 1, and there are at most INT32_MAX ranks.
  //   tp*cp*dp = etp*ep*edp, and cp_inner divides cp.
  //   ranks_per_node is from 1 to 8.
  //   fsdp_shard is 0, or is at least 2 and divides every larger group of ranks that hold the same parameters.
  void check() const;
  bool operator==(const MeshShape&) const = default;
};

// The coordinates of one rank in both views. Each counts from 0.
struct RankPlace {
  int64_t tp = 0, cp = 0, dp = 0, pp = 0, etp = 0, ep = 0, edp = 0;
  bool operator==(const RankPlace&) const = default;
};

// All of these REQUIRE that shape.check() passes and that ranks and coordinates are
// inside the shape.
RankPlace place_of(const MeshShape& shape, int world_rank);
int rank_in_dense_view(const MeshShape& shape, const RankPlace& place);   // reads tp, cp, dp, pp
int rank_in_expert_view(const MeshShape& shape, const RankPlace& place);  // reads etp, ep, edp, pp
// Returns the world ranks in world_rank's group of this axis, ascending.
std::vector<int> ranks_of_group(const MeshShape& shape, Axis axis, int world_rank);
int64_t group_size(const MeshShape& shape, Axis axis);
// Returns the number of ranks that a group of this axis has on each of its nodes. They are neighbours in the group. If
// each group is on one node, it is the size of the group. Returns 1 if a group has different numbers on its nodes.
int64_t ranks_on_node(const MeshShape& shape, Axis axis);

// The axes of ranks that hold the same parameters (ParamSpec::grad_axis).
inline constexpr std::array kGradAxes = {Axis::dp_cp, Axis::tp_cp_dp, Axis::edp, Axis::etp_edp};
// Returns the number of consecutive ranks of a group of such an axis over which the weights of a layer are sharded with
// parallel.fsdp: fsdp_shard, and all of a group that is not larger or where fsdp_shard is 0.
int64_t shard_size(const MeshShape& shape, Axis grad_axis);

std::string to_string(const RankPlace& place);  // "tp 0, cp 1, dp 0, pp 0, etp 0, ep 1, edp 0"

// Returns a table of every rank with its coordinates, then of every axis:
// the size and number of its groups, the ranks of the first group, and their purpose.
// The table shows all ranks if there are at most max_ranks, else the first max_ranks / 2 and the last one.
std::string layout_table(const MeshShape& shape, int64_t max_ranks = 64);

}  // namespace moebius
