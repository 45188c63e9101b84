#include "precision/product_precision.h"

#include <optional>

#include "ops/quantize/quantize.h"

namespace moebius {

// The format in which an operand is quantised.
struct ProductPrecision::Format {
  DType element;
  ScaleLayout layout;
  bool square = false, hadamard = false, stochastic = false;
};

struct ProductPrecision::Formats {
  Format x, w, dy, x_for_dw, dy_for_dw;
};

const ProductPrecision::Formats& ProductPrecision::formats_of(PrecisionRecipe recipe) {
  using enum ScaleLayout;
  constexpr Format kRows{DType::f8_e4m3, row_blocks}, kSquare{DType::f8_e4m3, square_blocks},
      kTensor{DType::f8_e4m3, per_tensor}, kWide{DType::f8_e5m2, per_tensor}, kMx{DType::f8_e4m3, mx_blocks};
  constexpr auto nv = [](bool square, bool hadamard, bool stochastic) {
    return Format{DType::f4_e2m1, nv_blocks, square, hadamard, stochastic};
  };
  static constexpr Formats kBlock{kRows, kSquare, kRows, kSquare, kRows},
      kPerTensor{kTensor, kTensor, kWide, kTensor, kWide}, kMxfp8{kMx, kMx, kMx, kMx, kMx},
      kNvfp4{nv(false, false, false), nv(true, false, false), nv(false, false, true), nv(false, true, false),
             nv(false, true, true)};
  switch (recipe) {
    case PrecisionRecipe::none:
      break;
    case PrecisionRecipe::fp8_block:
      return kBlock;
    case PrecisionRecipe::fp8_tensor:
      return kPerTensor;
    case PrecisionRecipe::mxfp8:
      return kMxfp8;
    case PrecisionRecipe::nvfp4:
      return kNvfp4;
  }
  MOEBIUS_ASSERT(!"a recipe that quantises");
}

int64_t split_multiple(PrecisionRecipe recipe) {
  switch (recipe) {
    case PrecisionRecipe::none:
      return 1;
    case PrecisionRecipe::fp8_block:
      return 128;
    case PrecisionRecipe::mxfp8:
      return 32;
    case PrecisionRecipe::fp8_tensor:
    case PrecisionRecipe::nvfp4:
      return 0;
  }
  MOEBIUS_ASSERT(!"unknown recipe");
}

bool is_emulated(PrecisionRecipe recipe, DeviceKind target, GpuProducts products) {
  if (target != DeviceKind::cuda || recipe == PrecisionRecipe::none || recipe == PrecisionRecipe::fp8_block)
    return false;
  return recipe != PrecisionRecipe::fp8_tensor || products == GpuProducts::emulated;
}

// Rows of operands begin at multiples of 16 bytes: those of x and w have `in` elements, and those of dy and w^T `out`.
bool has_f8_products(const Shape& w) {
  constexpr int64_t kMultiple = 16;
  return w[w.rank() - 2] % kMultiple == 0 && w[w.rank() - 1] % kMultiple == 0;
}

namespace {

Operand form_of(const Shape& shape, DType element, ScaleLayout layout, bool transposed) {
  const auto without_memory = [](const Shape& of, DType dtype) { return Tensor{.shape = of, .dtype = dtype}; };
  Operand q(without_memory(shape, element), without_memory(scale_shape(layout, shape), scale_dtype(layout)), layout);
  q.transposed = transposed;
  if (layout == ScaleLayout::nv_blocks) q.tensor_scale = without_memory(tensor_scale_shape(shape), DType::f32);
  return q;
}

// x = the values of q, in the rows and columns of the matrix that was quantised. hadamard: q was made with the transform.
void fill(Stream& s, const Tensor& x, const Operand& q, const Tensor& offsets_e1 = {}, bool hadamard = false) {
  if (q.transposed)
    dequantize_transposed(s, {.x_RC = x, .q = q, .offsets_e1 = offsets_e1, .hadamard = hadamard});
  else
    dequantize(s, {.x = x, .q = q});
}

void allocate(StepStack& stack, Operand& q) {
  q.data = stack.alloc(q.data.shape, q.data.dtype);
  q.scales = stack.alloc(q.scales.shape, q.scales.dtype);
  if (q.layout == ScaleLayout::nv_blocks) q.tensor_scale = stack.alloc(q.tensor_scale.shape, DType::f32);
}

}  // namespace

Operand ProductPrecision::quantised(const QuantizeContext& c, const Tensor& x, const RowGroups& rows,
                                    const Format& format, bool transposed) const {
  Shape shape = x.shape;
  if (transposed && x.shape.rank() == 3) shape = {x.dim(0), x.dim(2), x.dim(1)};
  if (transposed && x.shape.rank() == 2) {
    const int64_t R = rows.token_R.empty() ? x.dim(0) : rows.token_R.numel();
    shape = {x.dim(1), rows.offsets_e1.empty() ? padded_rows(R) : padded_rows(R, rows.offsets_e1.numel() - 1)};
  }
  const bool emulates = this->emulates(c.stream);
  Tensor values;
  if (emulates) {
    const int64_t R = rows.token_R.empty() || !transposed ? x.dim(0) : rows.token_R.numel();
    values = c.stack.alloc({R, x.dim(1)}, x.dtype);
  }
  std::optional<StackScope> until_dequantised;
  if (emulates) until_dequantised.emplace(c.stack);
  Operand q = form_of(shape, format.element, format.layout, transposed);
  allocate(c.stack, q);
  Quantize op{.q = q,
              .x_RC = x,
              .offsets_e1 = rows.offsets_e1,
              .token_R = transposed ? rows.token_R : Tensor{},
              .square = format.square,
              .hadamard = format.hadamard,
              .stats_5 = stats_5_ ? *stats_5_ : Tensor{}};
  if (format.stochastic) {
    op.stochastic = {
        .draw_2 = c.draw_2, .seed = seed_, .key = key_, .first_group = experts_.first, .num_groups = experts_.all};
  }
  quantize(c.stream, op);
  if (!emulates) return q;
  fill(c.stream, values, q, rows.offsets_e1, format.hadamard);
  return values;
}

Operand ProductPrecision::x(const QuantizeContext& c, Tensor x_TC, const RowGroups& rows) const {
  if (recipe_ == PrecisionRecipe::none) return x_TC;
  return quantised(c, x_TC, rows, formats_of(recipe_).x, false);
}

Operand ProductPrecision::weights_form(const Shape& w, bool transposed) const {
  const Format& format = formats_of(recipe_).w;
  const Shape turned = w.rank() == 2 ? Shape{w[1], w[0]} : Shape{w[0], w[2], w[1]};
  return form_of(transposed ? turned : w, format.element, format.layout, transposed);
}

void ProductPrecision::quantise_weights(Stream& s, const Operand& q, const Tensor& w) const {
  Quantize op{.q = q,
              .x_RC = w,
              .square = formats_of(recipe_).w.square,
              .stats_5 = stats_5_ && !q.transposed ? *stats_5_ : Tensor{}};
  if (w.shape.rank() == 2) {  // a matrix of weights has no rows to pad, so it is only transposed
    op.x_RC = w.view({1, w.dim(0), w.dim(1)});
    op.q.data = q.data.view({1, q.data.dim(0), q.data.dim(1)});
    if (q.layout != ScaleLayout::per_tensor) op.q.scales = q.scales.view({1, q.scales.dim(0), q.scales.dim(1)});
  }
  quantize(s, op);
}

Operand ProductPrecision::quantised_weights(const QuantizeContext& c, const Tensor& w, bool transposed) const {
  Operand q = weights_form(w.shape, transposed);
  allocate(c.stack, q);
  quantise_weights(c.stream, q, w);
  return for_products(c, q, w.dtype);
}

Operand ProductPrecision::for_products(const QuantizeContext& c, const Operand& q, DType dtype) const {
  if (!emulates(c.stream)) return q;
  const Tensor values = c.stack.alloc(q.shape(), dtype);
  fill(c.stream, values, q);
  return values;
}

Operand ProductPrecision::w(const QuantizeContext& c, Tensor w) const {
  if (recipe_ == PrecisionRecipe::none) return w;
  return quantised_weights(c, w, false);
}

Operand ProductPrecision::dy(const QuantizeContext& c, Tensor dy_TC, const RowGroups& rows) const {
  if (recipe_ == PrecisionRecipe::none) return dy_TC;
  return quantised(c, dy_TC, rows, formats_of(recipe_).dy, false);
}

Operand ProductPrecision::w_for_dx(const QuantizeContext& c, Tensor w) const {
  if (recipe_ == PrecisionRecipe::none) return w;
  return quantised_weights(c, w, true);
}

Operand ProductPrecision::x_for_dw(const QuantizeContext& c, Tensor x_TC, const RowGroups& rows) const {
  if (has_plain_dw()) return x_TC;
  return quantised(c, x_TC, rows, formats_of(recipe_).x_for_dw, true);
}

Operand ProductPrecision::dy_for_dw(const QuantizeContext& c, Tensor dy_TC, const RowGroups& rows) const {
  if (has_plain_dw()) return dy_TC;
  return quantised(c, dy_TC, rows, formats_of(recipe_).dy_for_dw, true);
}

}  // namespace moebius
