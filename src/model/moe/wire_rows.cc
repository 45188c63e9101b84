#include "model/moe/wire_rows.h"

#include "ops/quantize/quantized_rows.h"

namespace moebius {
namespace {

// Returns packed rows as bytes.
Tensor as_bytes(const Tensor& x) {
  Tensor bytes = x;
  bytes.shape = {x.dim(0), x.dim(1) * size_of(x.dtype)};
  bytes.dtype = DType::u8;
  return bytes;
}

}  // namespace

WireRows::WireRows(const PrecisionSpec& precision, DType dtype, int64_t D) : dtype_(dtype), D_(D) {
  if (precision.recipe == PrecisionRecipe::none || precision.dispatch == PrecisionChoice::compute) return;
  const int64_t bytes = quantized_row_bytes(D);
  MOEBIUS_CHECK(
      usage, bytes <= D * size_of(dtype),
      "precision.dispatch = \"recipe\" would send rows of {} bytes instead of {}; set it to \"compute\", or raise "
      "model.hidden_size",
      bytes, D * size_of(dtype));
  width_ = bytes / size_of(dtype);
}

Tensor WireRows::pack(Step& step, Tensor x_TD) const {
  if (!is_packed()) return x_TD;
  const Tensor rows = step.alloc({x_TD.dim(0), width_}, dtype_);
  pack_quantized_rows(step.stream, {.rows_TB = as_bytes(rows), .x_TD = x_TD});
  return rows;
}

Tensor WireRows::unpack(Step& step, Tensor rows_NW) const {
  if (!is_packed()) return rows_NW;
  const Tensor x_ND = step.alloc({rows_NW.dim(0), D_}, dtype_);
  unpack_quantized_rows(step.stream, {.x_TD = x_ND, .rows_TB = as_bytes(rows_NW)});
  return x_ND;
}

}  // namespace moebius
