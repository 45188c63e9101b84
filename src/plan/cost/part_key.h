// The values that a part depends on. Parts with the same key are the same.
#pragma once

#include "plan/part.h"

namespace moebius {

// Returns the recompute of the part's layer: a decoder layer, or a module of multi-token prediction.
RecomputeSpec recompute_of(const EngineSpec& spec, const StageSpec& stage);

// The kinds of layers that a part contains.
struct PartUses {
  bool attention = true;  // a layer, or modules of multi-token prediction
  bool experts = true;    // a layer with experts, or such modules
  bool dense = true;      // a layer without experts, or such modules
  bool window = false;    // all parts of a rank know its window, and the memory of rows
};
PartUses uses_of(const EngineSpec& spec, const StageSpec& stage);

// policy: PartLibrary::policy_of(spec). splits: as in PartLibrary::part(). REQUIRES: spec is resolved.
PartKey part_key(const EngineSpec& spec, const StageSpec& stage, size_t policy, bool splits);

}  // namespace moebius
