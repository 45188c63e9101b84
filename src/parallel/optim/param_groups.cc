#include "parallel/optim/param_groups.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {

// Weight decay is for matrices. It would pull norm weights, which start at 1, to 0.
std::vector<ParamGroup> param_groups(const OptimizerSpec& spec) {
  using enum ParamKind;
  return {{.kinds = {matrix, embedding, head, experts, router, adapter}, .weight_decay = spec.weight_decay},
          {.kinds = {norm, bias, sink}, .weight_decay = 0}};
}

const ParamGroup& group_of(std::span<const ParamGroup> groups, ParamKind kind) {
  const auto found = std::find_if(groups.begin(), groups.end(), [&](const ParamGroup& group) {
    return std::find(group.kinds.begin(), group.kinds.end(), kind) != group.kinds.end();
  });
  MOEBIUS_ASSERT(found != groups.end());
  return *found;
}

}  // namespace moebius
