#include "model/layers/pre_activation.h"

#include "ops/quantize/quantized_rows.h"

namespace moebius {

int64_t packed_columns(int64_t columns, DType dtype) {
  const int64_t bytes = quantized_row_bytes(columns);
  MOEBIUS_CHECK(
      usage, bytes < columns * size_of(dtype),
      "precision.activations = \"recipe\" would keep rows of {} bytes instead of {}; set it to \"compute\", or "
      "raise the inner width of the layer",
      bytes, columns * size_of(dtype));
  return bytes / size_of(dtype);
}

Tensor packed_bytes(const Tensor& packed_RW) {
  Tensor bytes = packed_RW;
  bytes.shape = {packed_RW.dim(0), packed_RW.dim(1) * size_of(packed_RW.dtype)};
  bytes.dtype = DType::u8;
  return bytes;
}

void PreActivation::declare(MemoryPlan& plan, const std::string& name, Shape shape, DType dtype,
                            bool RecomputeSpec::*what, bool in_8_bits) {
  in_8_bits_ = in_8_bits;
  if (!in_8_bits || plan.recompute().covers(what)) return numbers_.declare(plan, name, shape, dtype, what);
  numbers_.declare_in_place(shape, dtype);
  packed_.declare(plan, name, {shape[0], packed_columns(shape[1], dtype)}, dtype, what);
}

void PreActivation::save(Step& step, int64_t num_rows, const Tensor& offsets_e1) const {
  if (!is_saved_in_8_bits() || !step.batch.training) return;
  pack_quantized_rows(step.stream, {.rows_TB = packed_bytes(packed_.rows(0, num_rows)),
                                    .x_TD = numbers_.rows(0, num_rows),
                                    .offsets_e1 = offsets_e1});
}

Tensor PreActivation::packed_for_backward(Step& step, int64_t num_rows, const Tensor& offsets_e1) const {
  MOEBIUS_ASSERT(in_8_bits_);
  if (is_saved_in_8_bits()) return packed_bytes(packed_.rows(0, num_rows));
  const Tensor numbers = numbers_.rows(0, num_rows);
  const Tensor bytes = packed_bytes(step.alloc({num_rows, packed_columns(columns(), numbers.dtype)}, numbers.dtype));
  pack_quantized_rows(step.stream, {.rows_TB = bytes, .x_TD = numbers, .offsets_e1 = offsets_e1});
  return bytes;
}

// Recomputed values are rounded in place.
Tensor PreActivation::for_backward(Step& step, int64_t num_rows, const Tensor& offsets_e1) const {
  if (!in_8_bits_) return numbers_.rows(0, num_rows);
  const Tensor numbers =
      is_saved_in_8_bits() ? step.alloc({num_rows, columns()}, numbers_.dtype) : numbers_.rows(0, num_rows);
  StackScope scope(step.stack);
  const Tensor bytes = packed_for_backward(step, num_rows, offsets_e1);
  unpack_quantized_rows(step.stream, {.x_TD = numbers, .rows_TB = bytes, .offsets_e1 = offsets_e1});
  return numbers;
}

}  // namespace moebius
