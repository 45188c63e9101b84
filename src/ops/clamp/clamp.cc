#include "ops/clamp/clamp.h"

#include <cmath>

#include "ops/clamp/clamp_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const char* who, const Tensor& x, float limit) {
  MOEBIUS_CHECK(usage, x.dtype == DType::f32 || x.dtype == DType::bf16, "{}: x must be f32 or bf16; got {}", who,
                to_string(x));
  check_tensor(who, "x", x, x.dtype, x.shape);
  MOEBIUS_CHECK(usage, limit > 0 && std::isfinite(limit), "{}: limit must be above 0 and finite; got {}", who, limit);
}

float rounded(float limit, DType dtype) { return dtype == DType::bf16 ? to_f32(from_f32<bf16>(limit)) : limit; }

}  // namespace

void clamp_fwd(Stream& s, const ClampFwd& a) {
  check("clamp_fwd", a.x, a.limit);
  check_tensor("clamp_fwd", "y", a.y, a.x.dtype, a.x.shape);
  OpScope scope(s, "clamp_fwd", cost(a));
  if (a.x.empty()) return;
  const ClampFwd of_dtype{.y = a.y, .x = a.x, .limit = rounded(a.limit, a.x.dtype)};
  run_on_device(s, cpu::clamp_fwd, cuda::clamp_fwd, of_dtype);
}

Cost cost(const ClampFwd& a) {
  return {static_cast<double>(2 * a.x.numel()), static_cast<double>(2 * a.x.num_bytes())};
}

void clamp_bwd(Stream& s, const ClampBwd& a) {
  check("clamp_bwd", a.x, a.limit);
  check_tensor("clamp_bwd", "dx", a.dx, a.x.dtype, a.x.shape);
  check_tensor("clamp_bwd", "dy", a.dy, a.x.dtype, a.x.shape);
  OpScope scope(s, "clamp_bwd", cost(a));
  if (a.x.empty()) return;
  const ClampBwd of_dtype{.dx = a.dx, .dy = a.dy, .x = a.x, .limit = rounded(a.limit, a.x.dtype)};
  run_on_device(s, cpu::clamp_bwd, cuda::clamp_bwd, of_dtype);
}

Cost cost(const ClampBwd& a) {
  return {static_cast<double>(2 * a.x.numel()), static_cast<double>(3 * a.x.num_bytes())};
}

}  // namespace moebius
