// The quantisation of the operands of a parameter's products: the recipe of the run, and its exceptions.
#pragma once

#include "model/layer_context.h"
#include "precision/product_precision.h"

namespace moebius {

// The recipe of the run, or plain operands where precision.keep matches all parts of the parameter.
// Error{usage} where it matches some parts only, or where a block of the recipe would be split over
// ranks: every rank's blocks are those of a single rank.
ProductPrecision precision_of(const LayerContext& c, const ParamSpec& spec, ExpertRange experts = {});

inline QuantizeContext quantize_context(Step& step) {
  return {step.stream, step.stack, step.batch.scalars_memory.empty() ? Tensor{} : step.batch.draw_2()};
}

}  // namespace moebius
