#include "config/check/tensor_scales_check.h"

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {

void check_tensor_scales(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  const PrecisionRecipe recipe = s.precision.recipe;
  const int64_t dense = p.tp * p.cp, experts = p.ep * p.etp;
  if (recipe != PrecisionRecipe::fp8_tensor && recipe != PrecisionRecipe::nvfp4) return;
  const std::string_view name = name_of(recipe);
  MOEBIUS_CHECK(
      usage, dense % experts == 0 || experts % dense == 0,
      "precision.recipe = \"{}\" has scales that the ranks of a micro-batch share, and those that share "
      "experts: one of tp * cp and ep * etp must divide the other; got {} * {} and {} * {}; choose \"fp8_block\" or "
      "\"mxfp8\", or other degrees{}",
      name, p.tp, p.cp, p.ep, p.etp, origin(s, "precision.recipe"));
  MOEBIUS_CHECK(usage, p.etp == 1 || experts <= dense || p.expert_overlap == ExpertOverlap::none,
                "parallel.expert_overlap exchanges rows in the group of ep * etp = {} * {} ranks, in which "
                "precision.recipe = \"{}\" exchanges scales, since tp * cp = {} * {} is smaller; set "
                "parallel.expert_overlap to \"none\", or parallel.etp to 1{}",
                p.ep, p.etp, name, p.tp, p.cp, origin(s, "parallel.expert_overlap"));
  MOEBIUS_CHECK(usage, recipe != PrecisionRecipe::nvfp4 || !p.dynamic_cp,
                "parallel.dynamic_cp = true spreads tokens over ranks by their documents, so precision.recipe = "
                "\"nvfp4\" cannot draw as one rank does; set parallel.dynamic_cp = false, or choose another "
                "precision.recipe{}",
                origin(s, "parallel.dynamic_cp"));
}

}  // namespace moebius
