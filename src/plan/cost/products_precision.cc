#include "plan/work_time.h"

namespace moebius {
namespace {

// Returns whether Moebius multiplies quantised values in precision.compute on this GPU (precision/product_precision.h).
// fp8_block has kernels for Hopper alone. A plan refuses it for other GPUs (check_kernels()), unless they are
// not known.
bool is_emulated(const PrecisionSpec& precision, const PlanMachine& machine) {
  switch (precision.recipe) {
    case PrecisionRecipe::none:
      return false;
    case PrecisionRecipe::fp8_block:
      return !machine.has_hopper_kernels();
    case PrecisionRecipe::fp8_tensor:
      return !precision.has_f8_kernels || !machine.has_hopper_kernels() || precision.compute != DType::bf16;
    case PrecisionRecipe::mxfp8:
    case PrecisionRecipe::nvfp4:
      return true;
  }
  MOEBIUS_FAIL(internal, "is_emulated: a recipe that is not known");
}

}  // namespace

PlanPrecision products_precision(const EngineSpec& spec, const Assumptions& assume, const PlanMachine& machine) {
  if (assume.precision != PlanPrecision::from_recipe) return assume.precision;
  // Emulated operands are widened by ops of their own, and multiplied in precision.compute.
  const bool is_own = machine.is_gpu && assume.system == PlanSystem::moebius;
  if (is_own && is_emulated(spec.precision, machine)) return PlanPrecision::from_recipe;
  const bool is_4_bits = spec.precision.recipe == PrecisionRecipe::nvfp4;
  // Without such products the operands are widened, and multiplied as bf16.
  if ((is_4_bits ? machine.nvfp4_tflops : machine.fp8_tflops) <= 0) return PlanPrecision::from_recipe;
  switch (spec.precision.recipe) {
    case PrecisionRecipe::none:
      return PlanPrecision::from_recipe;
    case PrecisionRecipe::fp8_block:
      return PlanPrecision::fp8_block;
    case PrecisionRecipe::fp8_tensor:
      return PlanPrecision::fp8_tensor;
    case PrecisionRecipe::mxfp8:
      return PlanPrecision::mxfp8;
    case PrecisionRecipe::nvfp4:
      return PlanPrecision::nvfp4;
  }
  MOEBIUS_FAIL(internal, "products_precision: a recipe that is not known");
}

}  // namespace moebius
