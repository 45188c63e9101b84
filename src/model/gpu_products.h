// The quantised products of a run that a GPU computes on FP8 kernels, those that it emulates, and those that
// are refused.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "device/gpus_found.h"

namespace moebius {

// Clears precision.has_f8_kernels if run.kernels is "portable", or if one of the first num_ranks GPUs of this machine
// is not Hopper's: these are the GPUs of a run on one machine. Where no GPU is found, only run.kernels decides.
void set_f8_kernels(RunSpec& run, const GpusFound& gpus, int64_t num_ranks);

// Returns a text for the log of `train` and for `config`; empty on a CPU, without a recipe, and with fp8_block, which
// is never emulated. Layers of one kind share a name. REQUIRES: set_f8_kernels(run).
// knows_gpus: false if no GPU was found, so that the text has to cover all.
//   precision.recipe = "fp8_tensor": Hopper's FP8 kernels compute the products of
//   model.layers.*.self_attn.o_proj.weight, ...; emulated (operands are quantised, and multiplied in bf16):
//   model.layers.*.mlp.experts.down_proj
std::string gpu_products_text(const RunSpec& run, bool knows_gpus);

// Returns the parameters whose products the recipe of the run quantises, on any device; layers of one kind share
// a name.
std::vector<std::string> quantised_products(const RunSpec& run);

// Throws Error{usage} that names the first parameter whose products a recipe cannot compute because of its shape:
//   nvfp4 on any device     two elements share a byte, so rows and columns are even
//   fp8_block on a GPU      rows and columns are multiples of 16, the inner width of gated layers is a multiple of 128,
//                           and experts have SwiGLU without a clamp and no biases
// Parameters that precision.keep names are not checked, nor the shapes of single ranks: precision_of() does that.
// With adapters the products of dense gated layers have no such inner width.
void check_quantised_products(const ModelSpec& model, const PrecisionSpec& precision, const LoraSpec& lora,
                              DeviceKind device);

}  // namespace moebius
