// One value, two views of the same ranks: dense (tp, cp, dp, pp) for attention and everything shared, expert (etp, ep,
// edp, pp) for the experts; pp is common to both (Parallel Folding, arXiv 2504.14960). Groups are asked for by axis.
#pragma once

#include <array>
#include <memory>
#include <string_view>

#include "comm/group.h"

namespace moebius {

enum class Axis : int { tp, cp, dp, pp, etp, ep, edp, tp_cp, dp_cp, world };
inline constexpr int kNumAxes = 10;
std::string_view name_of(Axis axis);

struct MeshShape {
  int64_t tp = 1, cp = 1, dp = 1, pp = 1, etp = 1, ep = 1, edp = 1;
  int64_t world() const { return tp * cp * dp * pp; }
};

class Mesh {
 public:
  // The mesh of one rank. Error{usage} when the shape has more: only the self transport is part of this version.
  explicit Mesh(const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }
  Group& group(Axis axis) const { return *groups_[static_cast<int>(axis)]; }

 private:
  MeshShape shape_;
  std::array<std::shared_ptr<Group>, kNumAxes> groups_;
};

}  // namespace moebius
