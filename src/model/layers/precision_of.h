// The quantisation of the operands of a parameter's products, by the recipe of the run and its exceptions.
#pragma once

#include "model/layer_context.h"
#include "model/layers/tokens_of_rows.h"
#include "precision/product_precision.h"

namespace moebius {

// Returns whether precision.keep matches all parts of the parameter, so that its products are not quantised. Throws
// Error{usage} if it matches only some of them.
bool keeps_product(const PrecisionSpec& precision, const ParamSpec& spec);

// Returns the recipe of the run, or plain operands if keeps_product(). Throws the error of that, and Error{usage} if
// ranks would split a block of the recipe: blocks are the same on every layout.
ProductPrecision precision_of(const LayerContext& c, const ParamSpec& spec, ExpertRange experts = {});

// Returns the axis of the ranks that share the scales of expert rows, where a scale covers a whole tensor: those of a
// micro-batch, or those that share the experts if these are more. One kind of group consists of whole groups of the
// other, as check_tensor_scales() (config/check/tensor_scales_check.h) has checked.
Axis axis_of_expert_scales(const MeshShape& mesh);

// Returns whether a recipe quantises the products of this part of a parameter, if precision.keep does not name it:
// those of projections and of experts, but for the gate of a shared expert, which is one row, and for eh_proj, which
// joins a module of multi-token prediction to the model.
bool has_quantised_product(const ParamSpec& spec, const ParamPart& part);

// Returns whether FP8 kernels take the parts of a matrix whose rows are multiplied one part at a time: those of the
// latent and of the rotary columns. Other matrices have one part.
bool has_f8_parts(const ModelSpec& model, const ParamSpec& spec);

// Returns how GPUs compute the products of a parameter with fp8_tensor. The kernels of Hopper take bf16, rows and
// columns in multiples of 16, and experts with SwiGLU and without biases.
GpuProducts gpu_products_of(const PrecisionSpec& precision, const ModelSpec& model, const ParamSpec& spec);

// Returns the spec of a parameter in the format in which it is stored. With precision.weights = "recipe" a trained
// parameter is quantised. With a quantised lora.base it is f8_e4m3 or f4_e2m1 and frozen, and WeightOperands declares
// its scales as the parameter scales_name(); blocks then begin at the first row of each part. Throws Error{usage} if a
// block would have rows of two parts, or be split over ranks.
ParamSpec held_as_weights(const LayerContext& c, ParamSpec spec);
std::string scales_name(const std::string& param);
ScaleLayout held_layout(DType held);  // none for a dtype of computation

// The weights of a parameter as operands of products.
//   plain weights               are read in place.
//   weights to be quantised     have quantised copies in the plan in training, made once a step
//                               (ParamTable::make_copies). Without valid copies they are quantised at each use, on the
//                               step stack. Sharded weights (parallel.fsdp) have no copies, and nor have others
//                               without precision.weight_copies: a pass quantises what it reads.
//   trained, stored quantised   are read in place; their transpose is such a copy.
//   frozen, stored quantised    are dequantised at each use, on the step stack.
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
  const Param* scales_ = nullptr;  // scales of frozen weights that are stored quantised
  DType dtype_ = DType::f32;       // dtype of the computation, if there are scales_
  const ParamTable* params_ = nullptr;
  Copies* copies_ = nullptr;  // null: none are planned
};

// The tokens of dense rows, where a recipe draws by them, and ranks share a micro-batch or a layer computes it
// in chunks.
class DenseRows {
 public:
  DenseRows() = default;
  DenseRows(const LayerContext& c, const ProductPrecision& precision)
      : tokens_(c), draws_(precision.rounds_rows()), has_part_(c.mesh.shape().tp * c.mesh.shape().cp > 1) {}
  RowGroups groups(Step& step, int64_t num_rows) const {
    RowGroups rows;
    if (draws_ && (has_part_ || step.batch.first_row > 0)) rows.index_N = tokens_.index(step, num_rows);
    return rows;
  }

 private:
  TokensOfRows tokens_;
  bool draws_ = false, has_part_ = false;
};

// Statistics are those of training steps. An operand of the forward pass that backward quantises once more counts once.
inline QuantizeContext quantize_context(Step& step) {
  return {.stream = step.stream,
          .stack = step.stack,
          .draw_2 = step.batch.scalars_memory.empty() ? Tensor{} : step.batch.draw_2(),
          .counts = step.batch.training,
          .counts_forward = !step.batch.backward};
}

}  // namespace moebius
