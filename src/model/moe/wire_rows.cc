#include "model/moe/wire_rows.h"

#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"

namespace moebius {
namespace {

constexpr int64_t kRowBytes = 16;  // rows have a multiple of it, so that kernels move whole vectors

Tensor as_bytes(const Tensor& x) {
  Tensor bytes = x;
  bytes.shape = {x.dim(0), x.dim(1) * size_of(x.dtype)};
  bytes.dtype = DType::u8;
  return bytes;
}

}  // namespace

WireRows::WireRows(const PrecisionSpec& precision, DType dtype, int64_t D) : dtype_(dtype), D_(D) {
  if (precision.recipe == PrecisionRecipe::none || precision.dispatch == PrecisionChoice::compute) return;
  const int64_t bytes = div_ceil(D + num_scales() * size_of(DType::f32), kRowBytes) * kRowBytes;
  MOEBIUS_CHECK(
      usage, bytes <= D * size_of(dtype),
      "precision.dispatch = \"recipe\" makes rows of {} bytes of those of {}; set it to \"compute\", or raise "
      "model.hidden_size",
      bytes, D * size_of(dtype));
  width_ = bytes / size_of(dtype);
}

int64_t WireRows::num_scales() const { return scale_shape(ScaleLayout::row_blocks, {1, D_})[1]; }

Tensor WireRows::pack(Step& step, Tensor x_TD) const {
  if (!is_packed()) return x_TD;
  const int64_t T = x_TD.dim(0), B = num_scales();
  const Tensor rows = step.alloc({T, width_}, dtype_);
  StackScope scope(step.stack);
  const Operand q(step.alloc({T, D_}, DType::f8_e4m3), step.alloc({T, B}, DType::f32), ScaleLayout::row_blocks);
  quantize(step.stream, {.q = q, .x_RC = x_TD});
  copy_columns(step.stream, {.to_TA = as_bytes(rows), .from_TB = as_bytes(q.data), .count = D_});
  copy_columns(
      step.stream,
      {.to_TA = as_bytes(rows), .from_TB = as_bytes(q.scales), .to_first = D_, .count = B * size_of(DType::f32)});
  return rows;
}

Tensor WireRows::unpack(Step& step, Tensor rows_NW) const {
  if (!is_packed()) return rows_NW;
  const int64_t N = rows_NW.dim(0), B = num_scales();
  const Tensor x_ND = step.alloc({N, D_}, dtype_);
  StackScope scope(step.stack);
  const Operand q(step.alloc({N, D_}, DType::f8_e4m3), step.alloc({N, B}, DType::f32), ScaleLayout::row_blocks);
  copy_columns(step.stream, {.to_TA = as_bytes(q.data), .from_TB = as_bytes(rows_NW), .count = D_});
  copy_columns(
      step.stream,
      {.to_TA = as_bytes(q.scales), .from_TB = as_bytes(rows_NW), .from_first = D_, .count = B * size_of(DType::f32)});
  dequantize(step.stream, {.x = x_ND, .q = q});
  return x_ND;
}

}  // namespace moebius
