#include "ops/activation/activation.h"

#include "ops/activation/activation_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

// Checks h [T, 2F], and returns the shape {T, F}.
Shape check_h(const char* who, const Tensor& h) {
  MOEBIUS_CHECK(usage, (h.dtype == DType::f32 || h.dtype == DType::bf16) && h.shape.rank() == 2 && h.dim(1) % 2 == 0,
                "{}: h must be f32 or bf16 [T, 2 F]; got {}", who, to_string(h));
  check_tensor(who, "h", h, h.dtype, h.shape);
  return {h.dim(0), h.dim(1) / 2};
}

}  // namespace

void swiglu_fwd(Stream& s, const SwigluFwd& a) {
  const Shape TF = check_h("swiglu_fwd", a.h_T2F);
  check_tensor("swiglu_fwd", "a", a.a_TF, a.h_T2F.dtype, TF);
  OpScope scope(s, "swiglu_fwd", cost(a));
  if (a.h_T2F.empty()) return;
  run_on_device(s, cpu::swiglu_fwd, cuda::swiglu_fwd, a);
}

// Each element costs an exponential, an addition, a division and two products.
Cost cost(const SwigluFwd& a) {
  return {5.0 * a.a_TF.numel(), static_cast<double>(a.a_TF.num_bytes() + a.h_T2F.num_bytes())};
}

void swiglu_bwd(Stream& s, const SwigluBwd& a) {
  const char* who = "swiglu_bwd";
  const DType dtype = a.h_T2F.dtype;
  const Shape TF = check_h(who, a.h_T2F);
  check_tensor(who, "dh", a.dh_T2F, dtype, a.h_T2F.shape);
  check_tensor(who, "da", a.da_TF, dtype, TF);
  if (!a.a_TF.empty()) check_tensor(who, "a", a.a_TF, dtype, TF);
  OpScope scope(s, who, cost(a));
  if (a.h_T2F.empty()) return;
  run_on_device(s, cpu::swiglu_bwd, cuda::swiglu_bwd, a);
}

Cost cost(const SwigluBwd& a) {
  return {10.0 * a.da_TF.numel(),
          static_cast<double>(a.dh_T2F.num_bytes() + a.h_T2F.num_bytes() + a.da_TF.num_bytes() + a.a_TF.num_bytes())};
}

}  // namespace moebius
