// The descs of the grouped products of the expert ops, for which choose_config() chooses a kernel.
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
