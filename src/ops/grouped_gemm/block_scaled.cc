#include "ops/grouped_gemm/block_scaled.h"

#include "core/error.h"

namespace moebius {
namespace {

constexpr const char* kWay =
    "set precision.recipe to \"fp8_tensor\", which emulates products that no kernel takes, or to \"none\", add the "
    "parameter's name to precision.keep, or choose run.device = \"cpu\"";

// elements: those that may be, of at least one format.
void check_operand(const char* who, const char* name, const Operand& x, ScaleLayout layout,
                   TensorElements elements = TensorElements::e4m3) {
  using enum TensorElements;
  const bool takes_element =
      (x.data.dtype == DType::f8_e4m3 && elements != e5m2) || (x.data.dtype == DType::f8_e5m2 && elements != e4m3);
  MOEBIUS_CHECK(
      usage, takes_element && x.layout == layout && x.data.dim(x.data.shape.rank() - 1) % kBlockScaledDepth == 0,
      "{} on a GPU: {} must be {} with {} scales and rows of a multiple of {} elements; got {}; {}", who, name,
      elements == both   ? "f8_e4m3 or f8_e5m2"
      : elements == e5m2 ? "f8_e5m2"
                         : "f8_e4m3",
      name_of(layout), kBlockScaledDepth, to_string(x), kWay);
}

}  // namespace

void check_block_scaled(const char* who, const BlockScaledOperands& o) {
  if (o.a.layout == ScaleLayout::per_tensor && o.per_tensor != TensorElements::none) {
    check_operand(who, o.a_name, o.a, ScaleLayout::per_tensor, o.per_tensor);
    return check_operand(who, o.b_name, o.b, ScaleLayout::per_tensor);
  }
  check_operand(who, o.a_name, o.a, ScaleLayout::row_blocks);
  check_operand(who, o.b_name, o.b, ScaleLayout::square_blocks);
}

void check_block_scaled_result(const char* who, const char* name, const Tensor& t, int64_t columns) {
  MOEBIUS_CHECK(usage, t.dtype == DType::bf16 && t.dim(1) % columns == 0,
                "{} on a GPU: {} of a quantised product must be bf16 with a multiple of {} columns; got {}; {}, or "
                "precision.compute = \"bf16\"",
                who, name, columns, to_string(t), kWay);
}

}  // namespace moebius
