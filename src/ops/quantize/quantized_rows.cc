#include "ops/quantize/quantized_rows.h"

#include "ops/quantize/quantize_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

constexpr int64_t kRowBytes = 16;  // so that kernels move whole vectors of a row

void check(const char* who, const Tensor& rows, const Tensor& x) {
  MOEBIUS_CHECK(usage, x.shape.rank() == 2 && (x.dtype == DType::f32 || x.dtype == DType::bf16),
                "{}: x must be an f32 or bf16 matrix; got {}", who, to_string(x));
  check_tensor(who, "x", x, x.dtype, x.shape);
  check_tensor(who, "rows", rows, DType::u8, {x.dim(0), quantized_row_bytes(x.dim(1))});
}

double bytes_of(const Tensor& rows, const Tensor& x) { return static_cast<double>(rows.num_bytes() + x.num_bytes()); }

template <class Op>
void run(Stream& s, const char* who, const Op& a, void (*on_cpu)(Stream&, const Op&),
         void (*on_cuda)(Stream&, const Op&)) {
  check(who, a.rows_TB, a.x_TD);
  if (!a.offsets_e1.empty()) check_tensor(who, "offsets", a.offsets_e1, DType::i32, a.offsets_e1.shape);
  OpScope scope(s, who, cost(a));
  if (a.x_TD.empty()) return;
  run_on_device(s, on_cpu, on_cuda, a);
}

}  // namespace

int64_t quantized_row_bytes(int64_t D) {
  const int64_t scales = scale_shape(ScaleLayout::row_blocks, {1, D})[1];
  return div_ceil(D + scales * size_of(DType::f32), kRowBytes) * kRowBytes;
}

void pack_quantized_rows(Stream& s, const PackQuantizedRows& a) {
  run(s, "pack_quantized_rows", a, cpu::pack_quantized_rows, cuda::pack_quantized_rows);
}

// A comparison and a product for each element.
Cost cost(const PackQuantizedRows& a) { return {2 * static_cast<double>(a.x_TD.numel()), bytes_of(a.rows_TB, a.x_TD)}; }

void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a) {
  run(s, "unpack_quantized_rows", a, cpu::unpack_quantized_rows, cuda::unpack_quantized_rows);
}

Cost cost(const UnpackQuantizedRows& a) { return {static_cast<double>(a.x_TD.numel()), bytes_of(a.rows_TB, a.x_TD)}; }

}  // namespace moebius
