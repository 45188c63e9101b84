#include "precision/product_precision.h"

#include <optional>

#include "ops/quantize/mx_rows.h"
#include "ops/quantize/quantize.h"

namespace moebius {

// The format in which an operand is quantised.
struct ProductPrecision::Format {
  DType element;
  ScaleLayout layout;
  bool square = false, stochastic = false;
};

struct ProductPrecision::Formats {
  Format x, w, dy, x_for_dw, dy_for_dw;
};

const ProductPrecision::Formats& ProductPrecision::formats_of(PrecisionRecipe recipe) {
  using enum ScaleLayout;
  constexpr Format kRows{DType::f8_e4m3, row_blocks}, kSquare{DType::f8_e4m3, square_blocks},
      kTensor{DType::f8_e4m3, per_tensor}, kWide{DType::f8_e5m2, per_tensor}, kMx{DType::f8_e4m3, mx_blocks};
  constexpr auto nv = [](bool square, bool stochastic) {
    return Format{DType::f4_e2m1, nv_blocks, square, stochastic};
  };
  static constexpr Formats kBlock{kRows, kSquare, kRows, kSquare, kRows},
      kPerTensor{kTensor, kTensor, kWide, kTensor, kWide}, kMxfp8{kMx, kMx, kMx, kMx, kMx},
      kNvfp4{nv(false, false), nv(true, false), nv(false, true), nv(false, false), nv(false, true)};
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

bool scales_whole_tensors(PrecisionRecipe recipe) {
  return recipe == PrecisionRecipe::fp8_tensor || recipe == PrecisionRecipe::nvfp4;
}

int64_t split_multiple(PrecisionRecipe recipe) {
  switch (recipe) {
    case PrecisionRecipe::none:
    case PrecisionRecipe::fp8_tensor:
      return 1;
    case PrecisionRecipe::fp8_block:
      return 128;
    case PrecisionRecipe::mxfp8:
      return 32;
    case PrecisionRecipe::nvfp4:
      return 16;
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

// x = the values of q, in the rows and columns of the matrix that was quantised.
void fill(Stream& s, const Tensor& x, const Operand& q, const Tensor& offsets_e1 = {}) {
  if (q.transposed)
    dequantize_transposed(s, {.x_RC = x, .q = q, .offsets_e1 = offsets_e1});
  else
    dequantize(s, {.x = x, .q = q});
}

void allocate(StepStack& stack, Operand& q) {
  q.data = stack.alloc(q.data.shape, q.data.dtype);
  q.scales = stack.alloc(q.scales.shape, q.scales.dtype);
  if (q.layout == ScaleLayout::nv_blocks) q.tensor_scale = stack.alloc(q.tensor_scale.shape, DType::f32);
}

}  // namespace

namespace {

// Returns the shape of the quantised copy of rows, or of its transpose.
Shape shape_of_copy(const Tensor& x, const RowGroups& rows, bool transposed) {
  if (!transposed) return x.shape;
  if (x.shape.rank() == 3) return {x.dim(0), x.dim(2), x.dim(1)};
  const int64_t R = rows.token_R.empty() ? x.dim(0) : rows.token_R.numel();
  return {x.dim(1), rows.offsets_e1.empty() ? padded_rows(R) : padded_rows(R, rows.offsets_e1.numel() - 1)};
}

// The quantisation of rows, with the rest of its arguments at their defaults.
Quantize quantize_of(const Operand& q, const Tensor& x, const RowGroups& rows) {
  return {.q = q, .x_RC = x, .offsets_e1 = rows.offsets_e1, .token_R = q.transposed ? rows.token_R : Tensor{}};
}

}  // namespace

ProductPrecision::Rounding ProductPrecision::of_x(const QuantizeContext& c) const {
  return {formats_of(recipe_).x, false, false, sums(counts_.x && c.counts && c.counts_forward)};
}

ProductPrecision::Rounding ProductPrecision::of_dy(const QuantizeContext& c) const {
  const Format& format = formats_of(recipe_).dy;
  return {format, false, format.stochastic, sums(counts_.dy && c.counts)};
}

ProductPrecision::Rounding ProductPrecision::of_x_for_dw(const QuantizeContext& c) const {
  return {formats_of(recipe_).x_for_dw, true, false, sums(counts_.x_for_dw && c.counts)};
}

ProductPrecision::Rounding ProductPrecision::of_dy_for_dw(const QuantizeContext& c) const {
  const Format& format = formats_of(recipe_).dy_for_dw;
  return {format, true, format.stochastic, sums(counts_.dy_for_dw && c.counts)};
}

void ProductPrecision::measure(Stream& s, const Tensor& own_1, const Tensor& x, const RowGroups& rows,
                               const Rounding& how) const {
  const bool apart = !rows.measured.empty();  // then they are whole rows
  const Tensor& from = apart ? rows.measured : x;
  const RowGroups of = apart ? RowGroups{} : rows;
  const bool turned = how.transposed && !apart;
  const Operand form = form_of(shape_of_copy(from, of, turned), how.format.element, how.format.layout, turned);
  largest_magnitudes(s, {.bits_e = own_1, .of = quantize_of(form, from, of)});
}

Tensor ProductPrecision::exchange(const QuantizeContext& c, Group& ranks, const Tensor& own_B) const {
  const Tensor all = c.stack.alloc({ranks.size(), own_B.numel()}, DType::i32);
  ranks.all_gather(c.stream, all, own_B.view({1, own_B.numel()}));
  return all;
}

Operand ProductPrecision::quantised(const QuantizeContext& c, const Tensor& x, const RowGroups& rows,
                                    const Rounding& how, Magnitudes known) const {
  if (rounds_rows()) return rounded(c, x, rows, how);
  const Format& format = how.format;
  const bool transposed = how.transposed;
  const bool emulates = this->emulates(c.stream);
  Tensor values;
  if (emulates) {
    const int64_t R = rows.token_R.empty() || !transposed ? x.dim(0) : rows.token_R.numel();
    values = c.stack.alloc({R, x.dim(1)}, x.dtype);
  }
  if (emulates && format.layout == ScaleLayout::mx_blocks && !counts_.sums_5) {
    mx_round(c.stream, {.y_RC = values,
                        .x_NC = x,
                        .offsets_e1 = rows.offsets_e1,
                        .token_R = transposed ? rows.token_R : Tensor{},
                        .blocks_of_rows = transposed});
    return values;
  }
  std::optional<StackScope> until_dequantised;
  if (emulates) until_dequantised.emplace(c.stack);
  Operand q = form_of(shape_of_copy(x, rows, transposed), format.element, format.layout, transposed);
  allocate(c.stack, q);
  StackScope magnitudes(c.stack);
  if (ranks_.rows && known.all_WB.empty()) {
    const Tensor own_1 = c.stack.alloc({1}, DType::i32);
    measure(c.stream, own_1, x, rows, how);
    known.all_WB = exchange(c, *ranks_.rows, own_1);
  }
  Quantize op = quantize_of(q, x, rows);
  if (rows.counts_measured)
    count_measured(c, rows, how, known);
  else
    op.stats_5 = how.sums_5;
  op.magnitude_WB = known.all_WB;
  op.first_matrix = known.first;
  quantize(c.stream, op);
  if (!emulates) return q;
  fill(c.stream, values, q, rows.offsets_e1);
  return values;
}

// Quantises the rows of `measured` for the statistics alone.
void ProductPrecision::count_measured(const QuantizeContext& c, const RowGroups& rows, const Rounding& how,
                                      const Magnitudes& known) const {
  if (how.sums_5.empty()) return;
  StackScope scope(c.stack);
  Operand q = form_of(rows.measured.shape, how.format.element, how.format.layout, false);
  allocate(c.stack, q);
  Quantize op = quantize_of(q, rows.measured, {});
  op.stats_5 = how.sums_5;
  op.magnitude_WB = known.all_WB;
  op.first_matrix = known.first;
  quantize(c.stream, op);
}

std::pair<Operand, Operand> ProductPrecision::for_dw(const QuantizeContext& c, Tensor dy_TC, const RowGroups& dy_rows,
                                                     Tensor x_TC, const RowGroups& x_rows) const {
  if (!has_plain_dw() && rounds_rows()) return rounded_for_dw(c, dy_TC, dy_rows, x_TC, x_rows);
  if (has_plain_dw() || !ranks_.rows) {
    const Operand dy = dy_for_dw(c, dy_TC, dy_rows);
    return {dy, x_for_dw(c, x_TC, x_rows)};
  }
  const Rounding dy_how = of_dy_for_dw(c), x_how = of_x_for_dw(c);
  const Tensor own_2 = c.stack.alloc({2}, DType::i32);
  measure(c.stream, own_2.rows(0, 1), dy_TC, dy_rows, dy_how);
  measure(c.stream, own_2.rows(1, 2), x_TC, x_rows, x_how);
  const Tensor all_W2 = exchange(c, *ranks_.rows, own_2);
  const Operand dy = quantised(c, dy_TC, dy_rows, dy_how, {all_W2, 0});
  return {dy, quantised(c, x_TC, x_rows, x_how, {all_W2, 1})};
}

Operand ProductPrecision::x(const QuantizeContext& c, Tensor x_TC, const RowGroups& rows) const {
  if (recipe_ == PrecisionRecipe::none) return x_TC;
  return quantised(c, x_TC, rows, of_x(c));
}

Operand ProductPrecision::weights_form(const Shape& w, bool transposed) const {
  const Format& format = formats_of(recipe_).w;
  const Shape turned = w.rank() == 2 ? Shape{w[1], w[0]} : Shape{w[0], w[2], w[1]};
  return form_of(transposed ? turned : w, format.element, format.layout, transposed);
}

void ProductPrecision::quantise_weights(Stream& s, const Operand& q, const Tensor& w,
                                        const Tensor& magnitude_We) const {
  quantise_weights(s, q, w, magnitude_We, sums(counts_.w && !q.transposed));
}

void ProductPrecision::quantise_weights(Stream& s, const Operand& q, const Tensor& w, const Tensor& magnitude_We,
                                        const Tensor& sums_5) const {
  Quantize op{
      .q = q, .x_RC = w, .square = formats_of(recipe_).w.square, .stats_5 = sums_5, .magnitude_WB = magnitude_We};
  if (w.shape.rank() == 2) {  // a matrix of weights has no rows to pad, so it is only transposed
    op.x_RC = w.view({1, w.dim(0), w.dim(1)});
    op.q.data = q.data.view({1, q.data.dim(0), q.data.dim(1)});
    if (q.layout != ScaleLayout::per_tensor) op.q.scales = q.scales.view({1, q.scales.dim(0), q.scales.dim(1)});
  }
  quantize(s, op);
}

// A matrix and its transpose have one largest magnitude.
void ProductPrecision::exchange_weights(Stream& s, const Tensor& all_We, const Tensor& own_e, const Tensor& w) const {
  const Format& format = formats_of(recipe_).w;
  largest_magnitudes(s,
                     {.bits_e = own_e, .of = {.q = form_of(w.shape, format.element, format.layout, false), .x_RC = w}});
  ranks_.weights->all_gather(s, all_We, own_e.view({1, own_e.numel()}));
}

Operand ProductPrecision::quantised_weights(const QuantizeContext& c, const Tensor& w, bool transposed) const {
  Operand q = weights_form(w.shape, transposed);
  allocate(c.stack, q);
  {
    StackScope magnitudes(c.stack);
    Tensor all_We;
    if (ranks_.weights) {
      const int64_t e = w.shape.rank() == 3 ? w.dim(0) : 1;
      all_We = c.stack.alloc({num_weight_ranks(), e}, DType::i32);
      exchange_weights(c.stream, all_We, c.stack.alloc({e}, DType::i32), w);
    }
    quantise_weights(c.stream, q, w, all_We, {});
  }
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
  return quantised(c, dy_TC, rows, of_dy(c));
}

Operand ProductPrecision::w_for_dx(const QuantizeContext& c, Tensor w) const {
  if (recipe_ == PrecisionRecipe::none) return w;
  return quantised_weights(c, w, true);
}

Operand ProductPrecision::x_for_dw(const QuantizeContext& c, Tensor x_TC, const RowGroups& rows) const {
  if (has_plain_dw()) return x_TC;
  return quantised(c, x_TC, rows, of_x_for_dw(c));
}

Operand ProductPrecision::dy_for_dw(const QuantizeContext& c, Tensor dy_TC, const RowGroups& rows) const {
  if (has_plain_dw()) return dy_TC;
  return quantised(c, dy_TC, rows, of_dy_for_dw(c));
}

}  // namespace moebius
