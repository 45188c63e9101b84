// The check of what only kernels for Hopper GPUs can run. The engine checks its GPU, and a plan that of its machine.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// The needs of a run that only these kernels meet.
struct HopperNeeds {
  PrecisionRecipe recipe = PrecisionRecipe::none;
  bool fuses_grad = false;  // optimizer.fuse_grad
  bool splits_batch =
      false;  // training in bf16 on several ranks of experts with parallel.expert_overlap = "batch_split"
  KernelChoice kernels = KernelChoice::automatic;
};
// Returns the needs of a run that trains on GPUs; none on a CPU.
HopperNeeds hopper_needs(const RunSpec& run);

// Throws Error{usage} with the key if a GPU of this compute capability lacks kernels that the run needs.
void check_hopper_needs(const HopperNeeds& needs, int capability_major, int capability_minor);

}  // namespace moebius
