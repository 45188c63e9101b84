// The quantised products of a run that a GPU computes on FP8 kernels, and those that it emulates.
#pragma once

#include <string>

#include "config/run_spec.h"

namespace moebius {

// Returns a text for the log of `train` and for `config`; empty on a CPU, without a recipe, and with fp8_block, which is
// never emulated. Layers of one kind share a name. has_hopper: false if the GPU of the run is known to be another one.
//   precision.recipe = "fp8_tensor" on a GPU: Hopper's FP8 kernels compute model.layers.*.self_attn.o_proj.weight; ...
std::string gpu_products_text(const RunSpec& run, bool has_hopper = true);

}  // namespace moebius
