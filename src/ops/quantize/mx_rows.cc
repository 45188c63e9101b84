#include "ops/quantize/mx_rows.h"

#include "ops/op_checks.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const MxRound& a) {
  constexpr const char* who = "mx_round";
  MOEBIUS_CHECK(usage, a.x_NC.shape.rank() == 2 && (a.x_NC.dtype == DType::f32 || a.x_NC.dtype == DType::bf16),
                "{}: x must be an f32 or bf16 matrix; got {}", who, to_string(a.x_NC));
  check_tensor(who, "x", a.x_NC, a.x_NC.dtype, a.x_NC.shape);
  if (!a.offsets_e1.empty()) {
    MOEBIUS_CHECK(usage, a.offsets_e1.shape.rank() == 1 && a.offsets_e1.numel() >= 2,
                  "{}: offsets must be i32 [experts + 1]; got {}", who, to_string(a.offsets_e1));
    check_tensor(who, "offsets", a.offsets_e1, DType::i32, a.offsets_e1.shape);
  }
  MOEBIUS_CHECK(usage, a.token_R.empty() || (a.blocks_of_rows && !a.offsets_e1.empty()),
                "{}: rows are gathered by token only in blocks of rows, and with offsets; got token {}", who,
                to_string(a.token_R));
  const int64_t R = a.token_R.empty() ? a.x_NC.dim(0) : a.token_R.numel();
  if (!a.token_R.empty()) check_tensor(who, "token", a.token_R, DType::i32, {R});
  check_tensor(who, "y", a.y_RC, a.x_NC.dtype, {R, a.x_NC.dim(1)});
}

}  // namespace

void mx_round(Stream& s, const MxRound& a) {
  check(a);
  OpScope scope(s, "mx_round", cost(a));
  if (a.y_RC.empty()) return;
  run_on_device(s, cpu::mx_round, cuda::mx_round, a);
}

// Counts a comparison, a product and the product with the scale for each element.
Cost cost(const MxRound& a) {
  return {3 * static_cast<double>(a.y_RC.numel()), 2 * static_cast<double>(a.y_RC.num_bytes())};
}

}  // namespace moebius
