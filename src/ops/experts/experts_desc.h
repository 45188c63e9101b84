// The grouped product inside each op of the experts, as a desc: what choose_config() chooses
// a kernel for.
#pragma once

#include "ops/experts/experts.h"
#include "ops/grouped_gemm/grouped_gemm_config.h"

namespace moebius {

// REQUIRES: arguments that the op accepts, or those of a dense product
// without offsets (ops/gated_mlp).
GroupedGemmDesc describe(const ExpertUp& a);
GroupedGemmDesc describe(const ExpertDown& a);
GroupedGemmDesc describe(const DExpertDown& a);
GroupedGemmDesc describe(const DExpertUp& a);
GroupedGemmDesc describe(const ExpertWgrad& a);

}  // namespace moebius
