// Who is where: two views of the same ranks (Parallel Folding, arXiv 2504.14960). The dense view (tp, cp, dp, pp) is
// for attention and all that is shared, the expert view (etp, ep, edp, pp) for the experts. pp is common to both: a
// stage of the pipeline is the same ranks in either view, and inside it ep may span tp, cp and dp.
//
//   world_rank = tp  + TP  (cp + CP (dp  + DP  pp))       the left axis changes first
//              = etp + ETP (ep + EP (edp + EDP pp))
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

// Groups are asked for by axis. Those with several names hold every rank that differs in these coordinates alone.
// pp_back holds the ranks of pp: hidden states and gradients between the same two ranks are two streams of messages.
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
  tp_pp,
  etp_ep_pp,
  world
};
inline constexpr int kNumAxes = 15;
std::string_view name_of(Axis axis);
// What the groups of an axis are for, in a few words.
std::string_view purpose_of(Axis axis);

struct MeshShape {
  int64_t tp = 1, cp = 1, dp = 1, pp = 1, etp = 1, ep = 1, edp = 1;
  int64_t world() const { return tp * cp * dp * pp; }
  // Error{usage} with the equation that fails: degrees of at least 1,
  // tp*cp*dp = etp*ep*edp, and at most INT32_MAX ranks.
  void check() const;
  bool operator==(const MeshShape&) const = default;
};

// Where one rank stands in both views.
struct RankPlace {
  int64_t tp = 0, cp = 0, dp = 0, pp = 0, etp = 0, ep = 0, edp = 0;
  bool operator==(const RankPlace&) const = default;
};

// REQUIRES in all of these: shape.check() passes, ranks and coordinates are inside the shape.
RankPlace place_of(const MeshShape& shape, int world_rank);
int rank_in_dense_view(const MeshShape& shape, const RankPlace& place);   // reads tp, cp, dp, pp
int rank_in_expert_view(const MeshShape& shape, const RankPlace& place);  // reads etp, ep, edp, pp
// The ranks of the world in world_rank's group of this axis, ascending.
std::vector<int> ranks_of_group(const MeshShape& shape, Axis axis, int world_rank);
int64_t group_size(const MeshShape& shape, Axis axis);

std::string to_string(const RankPlace& place);  // "tp 0, cp 1, dp 0, pp 0, etp 0, ep 1, edp 0"

// Every rank with its coordinates, then every axis with the size and number of its groups, the first of them and what
// it is for. Of more than `most` ranks the first half of that and the last are shown.
std::string layout_table(const MeshShape& shape, int64_t most = 64);

}  // namespace moebius
