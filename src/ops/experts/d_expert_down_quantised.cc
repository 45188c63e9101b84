#include "ops/experts/d_expert_down_quantised.h"

#include "ops/experts/experts_backends.h"
#include "ops/grouped_gemm/block_scaled.h"
#include "ops/op_checks.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantized_rows.h"

namespace moebius {
namespace {

constexpr const char* kWho = "d_expert_down_quantised";

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }
double bytes_of(const Operand& q) { return bytes_of(q.data) + bytes_of(q.scales); }

void check_blocks(const char* name, const Operand& q, const Shape& shape, bool transposed,
                  ScaleLayout layout = ScaleLayout::row_blocks) {
  check_quantised(kWho, name, q, shape, transposed);
  MOEBIUS_CHECK(usage, q.layout == layout && q.data.dtype == DType::f8_e4m3,
                "{}: {} must be f8_e4m3 with {} scales; got {}", kWho, name, name_of(layout), to_string(q));
}

void check(const DExpertDownQuantised& a, const Stream& s) {
  check_matrix(kWho, "g", a.g_RF);
  const DType dtype = a.g_RF.dtype;
  const int64_t R = a.num_rows(), F = a.num_columns(), e = a.rows.offsets_e1.numel() - 1;
  check_quantised(kWho, "dout", a.dout_TD, a.dout_TD.data.shape, false);
  check_quantised(kWho, "w2", a.w2_eDF, {e, a.dout_TD.data.dim(1), F}, true);
  if (a.is_packed())
    check_tensor(kWho, "h_rows", a.h_rows_RB, DType::u8, {R, quantized_row_bytes(2 * F)});
  else
    check_tensor(kWho, "h", a.h_R2F, dtype, {R, 2 * F});
  check_tensor(kWho, "weight", a.weight_R, DType::f32, {R});
  check_tensor(kWho, "dweight", a.dweight_R, DType::f32, {R});
  check_tensor(kWho, "offsets", a.rows.offsets_e1, DType::i32, {e + 1});
  if (!a.rows.token_R.empty()) check_tensor(kWho, "token", a.rows.token_R, DType::i32, {R});
  check_blocks("dh_rows", a.dh_rows, {R, 2 * F}, false);
  if (a.has_columns()) {
    check_blocks("dh_columns", a.dh_columns, {padded_rows(R, e), 2 * F}, true);
    check_blocks("sa_columns", a.sa_columns, {padded_rows(R, e), F}, true, ScaleLayout::square_blocks);
  }
  if (a.has_plain()) {
    check_tensor(kWho, "dh", a.dh_R2F, dtype, {R, 2 * F});
    check_tensor(kWho, "sa", a.sa_RF, dtype, {R, F});
  }
  if (s.target() == DeviceKind::cuda) {
    check_block_scaled(kWho, {"dout", a.dout_TD, "w2", a.w2_eDF});
    check_block_scaled_result(kWho, "g", a.g_RF, kGroupAlign);
  }
  check_scratch(kWho, a.scratch, DExpertDownQuantised::scratch_bytes(a, s));
}

// Consecutive tensors in the scratch.
class ScratchSpace {
 public:
  explicit ScratchSpace(const Tensor& scratch) : scratch_(scratch) {}
  Tensor take(const Shape& shape, DType dtype) {
    const Tensor t{.data = at(), .shape = shape, .dtype = dtype, .device = scratch_.device};
    used_ += aligned(shape, dtype);
    return t;
  }
  Tensor rest() const {
    return {.data = at(), .shape = {scratch_.num_bytes() - used_}, .dtype = DType::u8, .device = scratch_.device};
  }
  static int64_t aligned(const Shape& shape, DType dtype) { return (shape.numel() * size_of(dtype) + 63) / 64 * 64; }

 private:
  void* at() const { return scratch_.data ? static_cast<char*>(scratch_.data) + used_ : nullptr; }
  const Tensor& scratch_;
  int64_t used_ = 0;
};

Shape h_shape(const DExpertDownQuantised& a) { return {a.num_rows(), 2 * a.num_columns()}; }
Shape sa_shape(const DExpertDownQuantised& a) { return {a.num_rows(), a.num_columns()}; }

DExpertDown plain_op(const DExpertDownQuantised& a) {
  return {.dh_R2F = a.dh_R2F,
          .sa_RF = a.sa_RF,
          .dweight_R = a.dweight_R,
          .dout_TD = a.dout_TD,
          .w2_eDF = a.w2_eDF,
          .h_R2F = a.h_R2F,
          .weight_R = a.weight_R,
          .rows = a.rows};
}

// The op as the separate ops that it fuses.
void run_apart(Stream& s, const DExpertDownQuantised& a) {
  DExpertDown op = plain_op(a);
  ScratchSpace space(a.scratch);
  const DType dtype = a.g_RF.dtype;
  if (!a.has_plain()) {
    op.dh_R2F = space.take(h_shape(a), dtype);
    op.sa_RF = space.take(sa_shape(a), dtype);
  }
  if (a.is_packed()) {
    op.h_R2F = space.take(h_shape(a), dtype);
    unpack_quantized_rows(s, {.x_TD = op.h_R2F, .rows_TB = a.h_rows_RB, .offsets_e1 = a.rows.offsets_e1});
  }
  op.scratch = space.rest();
  d_expert_down(s, op);
  quantize(s, {.q = a.dh_rows, .x_RC = op.dh_R2F, .offsets_e1 = a.rows.offsets_e1});
  if (!a.has_columns()) return;
  quantize(s, {.q = a.dh_columns, .x_RC = op.dh_R2F, .offsets_e1 = a.rows.offsets_e1});
  quantize(s, {.q = a.sa_columns, .x_RC = op.sa_RF, .offsets_e1 = a.rows.offsets_e1});
}

Cost product_cost(const DExpertDownQuantised& a) {
  return {.flops = 2.0 * static_cast<double>(a.g_RF.numel()) * static_cast<double>(a.dout_TD.data.dim(1)),
          .bytes = bytes_of(a.dout_TD) + bytes_of(a.w2_eDF) + bytes_of(a.g_RF),
          .weight_bytes = bytes_of(a.w2_eDF)};
}

Cost pass_cost(const DExpertDownQuantised& a) {
  return {10.0 * static_cast<double>(a.g_RF.numel()),
          bytes_of(a.g_RF) + bytes_of(a.h_R2F) + bytes_of(a.h_rows_RB) + bytes_of(a.dh_rows) + bytes_of(a.dh_columns) +
              bytes_of(a.sa_columns) + bytes_of(a.dh_R2F) + bytes_of(a.sa_RF) + 2 * bytes_of(a.weight_R)};
}

}  // namespace

void d_expert_down_quantised(Stream& s, const DExpertDownQuantised& a) {
  check(a, s);
  if (s.target() != DeviceKind::cuda) return run_apart(s, a);
  const bool runs = s.device() == DeviceKind::cuda;
  {
    OpScope scope(s, "d_expert_down", product_cost(a));
    if (runs && !a.g_RF.empty()) cuda::d_expert_down_product(s, a);
  }
  OpScope scope(s, "d_gated_quantised", pass_cost(a));
  if (runs) cuda::d_gated_quantised(s, a);
}

int64_t DExpertDownQuantised::scratch_bytes(const DExpertDownQuantised& a, const Stream& s) {
  const DType dtype = a.g_RF.dtype;
  if (s.target() == DeviceKind::cuda)
    return div_ceil(a.num_columns(), kGroupAlign) * a.num_rows() * size_of(DType::f32);
  DExpertDown op = plain_op(a);
  op.dh_R2F = op.h_R2F = {.shape = h_shape(a), .dtype = dtype};
  op.sa_RF = {.shape = sa_shape(a), .dtype = dtype};
  int64_t bytes = DExpertDown::scratch_bytes(op, s);
  if (!a.has_plain()) bytes += ScratchSpace::aligned(h_shape(a), dtype) + ScratchSpace::aligned(sa_shape(a), dtype);
  if (a.is_packed()) bytes += ScratchSpace::aligned(h_shape(a), dtype);
  return bytes;
}

}  // namespace moebius
