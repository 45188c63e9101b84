// The quantisation of the operands of a parameter's products: the recipe of the run, and its exceptions.
#pragma once

#include "model/layer_context.h"
#include "precision/product_precision.h"

namespace moebius {

// The recipe of the run, or plain operands where precision.keep matches all parts of the parameter.
// Error{usage} where it matches some parts only, or where a block of the recipe would be split over
// ranks: every rank's blocks are those of a single rank.
ProductPrecision precision_of(const LayerContext& c, const ParamSpec& spec, ExpertRange experts = {});

// The declaration of a parameter of products. precision.weights = "recipe" holds it quantised where it is trained.
// Where lora.base holds it in few bits it has f8_e4m3 or f4_e2m1 and is frozen, and WeightOperands declares its scales
// as the parameter scales_name(). Blocks then begin at the first row of each part here, so Error{usage} where one
// would have rows of two parts or be split over ranks.
ParamSpec held_as_weights(const LayerContext& c, ParamSpec spec);
std::string scales_name(const std::string& param);
ScaleLayout held_layout(DType held);  // none for a dtype of computation

// The operands that the weights of a parameter are in products. In training the plan has room for quantised
// ones, which a step makes once (ParamTable::make_copies). Where they do not hold, weights are quantised at
// each use, on the step stack. Weights that training holds quantised are read in place, and of their transpose there is
// such a copy. Frozen weights in few bits are made plain at each use, on the step stack.
class WeightOperands {
 public:
  WeightOperands(const LayerContext& c, const Param& param, const ProductPrecision& precision);
  explicit WeightOperands(const Param& param) : param_(param) {}  // plain
  Operand w(Step& step) const;                                    // y = x W^T
  Operand w_for_dx(Step& step) const;                             // dx = dy W

 private:
  class Copies;
  const Param& param_;
  ProductPrecision precision_;
  Tensor plain(Step& step) const;
  Operand transposed(Step& step) const;
  const Param* scales_ = nullptr;  // of weights that are held in few bits
  DType dtype_ = DType::f32;       // of the computation, with scales_
  const ParamTable* params_ = nullptr;
  Copies* copies_ = nullptr;  // null: none are planned
};

inline QuantizeContext quantize_context(Step& step) {
  return {step.stream, step.stack, step.batch.scalars_memory.empty() ? Tensor{} : step.batch.draw_2()};
}

}  // namespace moebius
