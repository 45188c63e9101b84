#include "config/check/hopper_check.h"

#include <fmt/format.h>

#include "config/check/batch_split_check.h"
#include "core/error.h"

namespace moebius {

HopperNeeds hopper_needs(const RunSpec& run) {
  if (run.device != DeviceKind::cuda) return {};
  return {.recipe = run.precision.recipe,
          .fuses_grad = run.optimizer.fuse_grad,
          .splits_batch = !split_kernels_note(run).empty(),
          .kernels = run.kernels};
}

void check_hopper_needs(const HopperNeeds& needs, int capability_major, int capability_minor) {
  const bool is_hopper = capability_major == 9 && capability_minor == 0;
  const bool has_kernels = is_hopper && needs.kernels == KernelChoice::automatic;
  MOEBIUS_CHECK(usage, needs.recipe != PrecisionRecipe::fp8_block || is_hopper,
                "precision.recipe = \"{}\" needs a GPU of compute capability 9.0; this one has {}.{}; set "
                "precision.recipe = \"none\", or to \"fp8_tensor\", \"mxfp8\" or \"nvfp4\", which this GPU emulates",
                name_of(needs.recipe), capability_major, capability_minor);
  MOEBIUS_CHECK(usage, !needs.fuses_grad || has_kernels,
                "optimizer.fuse_grad = true needs the kernels of a GPU of compute capability 9.0; this one has {}.{}, "
                "and run.kernels is \"{}\"; set optimizer.fuse_grad = false",
                capability_major, capability_minor, name_of(needs.kernels));
  if (needs.splits_batch)
    check_split_kernels(has_kernels, fmt::format("one of {}.{}, with run.kernels = \"{}\"", capability_major,
                                                 capability_minor, name_of(needs.kernels)));
}

}  // namespace moebius
