#include "config/check/tensor_scales_check.h"

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {

void check_tensor_scales(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  const PrecisionRecipe recipe = s.precision.recipe;
  const int64_t dense = p.tp * p.cp, experts = p.ep * p.etp;
  MOEBIUS_CHECK(
      usage, recipe != PrecisionRecipe::nvfp4 || dense * experts == 1,
      "precision.recipe = \"nvfp4\" does not run where ranks of tp, cp, ep or etp share a tensor, since its random "
      "draws are numbered by the rows and columns of one rank: tp * cp * ep * etp must be 1; got {} * {} * {} * {}; choose \"fp8_tensor\", \"fp8_block\" or "
      "\"mxfp8\", or other degrees{}",
      p.tp, p.cp, p.ep, p.etp, origin(s, "precision.recipe"));
  if (recipe != PrecisionRecipe::fp8_tensor) return;
  MOEBIUS_CHECK(
      usage, dense % experts == 0 || experts % dense == 0,
      "precision.recipe = \"fp8_tensor\" has scales that the ranks of a micro-batch share, and those that share "
      "experts: one of tp * cp and ep * etp must divide the other; got {} * {} and {} * {}; choose \"fp8_block\" or "
      "\"mxfp8\", or other degrees{}",
      p.tp, p.cp, p.ep, p.etp, origin(s, "precision.recipe"));
  MOEBIUS_CHECK(usage, p.etp == 1 || experts <= dense || p.expert_overlap == ExpertOverlap::none,
                "parallel.expert_overlap exchanges rows in the group of ep * etp = {} * {} ranks, in which "
                "precision.recipe = \"fp8_tensor\" exchanges scales, since tp * cp = {} * {} is smaller; set "
                "parallel.expert_overlap to \"none\", or parallel.etp to 1{}",
                p.ep, p.etp, p.tp, p.cp, origin(s, "parallel.expert_overlap"));
}

}  // namespace moebius
