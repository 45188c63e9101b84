// Parameter groups: which settings of an optimizer apply to which kinds of parameters.
#pragma once

#include <span>
#include <vector>

#include "config/train_spec.h"
#include "model/params.h"

namespace moebius {

struct ParamGroup {
  std::vector<ParamKind> kinds;
  double weight_decay = 0;
};

// The groups of a run. Every kind that is trained is in one of them.
std::vector<ParamGroup> param_groups(const OptimizerSpec& spec);

// Returns the group of a kind. REQUIRES that there is one.
const ParamGroup& group_of(std::span<const ParamGroup> groups, ParamKind kind);

}  // namespace moebius
