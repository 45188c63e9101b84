#include "ops/gated_mlp/gated_mlp.h"

#include "ops/gated_mlp/gated_mlp_backends.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

// A matrix of f32 or bf16, which the others follow.
void check_matrix(const char* who, const char* name, const Tensor& t) {
  MOEBIUS_CHECK(usage, (t.dtype == DType::f32 || t.dtype == DType::bf16) && t.shape.rank() == 2,
                "{}: {} must be an f32 or bf16 matrix; got {}", who, name, to_string(t));
  check_tensor(who, name, t, t.dtype, t.shape);
}

}  // namespace

void gated_up(Stream& s, const GatedUp& a) {
  constexpr const char* who = "gated_up";
  check_plain(who, "x", a.x_TD);
  check_plain(who, "w", a.w_2FD);
  check_matrix(who, "x", a.x_TD.data);
  check_matrix(who, "a", a.a_TF);
  const DType dtype = a.x_TD.data.dtype;
  const int64_t T = a.x_TD.data.dim(0), D = a.x_TD.data.dim(1), F = a.a_TF.dim(1);
  check_tensor(who, "a", a.a_TF, dtype, {T, F});
  check_tensor(who, "h", a.h_T2F, dtype, {T, 2 * F});
  check_tensor(who, "w", a.w_2FD.data, dtype, {2 * F, D});
  OpScope scope(s, who, cost(a));
  if (a.a_TF.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::gated_up(s, a);
    case DeviceKind::cuda:
      return cuda::gated_up(s, a);
    case DeviceKind::null:
      return;
  }
}

Cost cost(const GatedUp& a) {
  return {2.0 * static_cast<double>(a.h_T2F.numel() * a.x_TD.data.dim(1)),
          bytes_of(a.x_TD.data) + bytes_of(a.w_2FD.data) + bytes_of(a.h_T2F) + bytes_of(a.a_TF)};
}

void d_gated_down(Stream& s, const DGatedDown& a) {
  constexpr const char* who = "d_gated_down";
  check_plain(who, "dy", a.dy_TD);
  check_plain(who, "w", a.w_DF);
  check_matrix(who, "dy", a.dy_TD.data);
  check_matrix(who, "a", a.a_TF);
  const DType dtype = a.dy_TD.data.dtype;
  const int64_t T = a.dy_TD.data.dim(0), D = a.dy_TD.data.dim(1), F = a.a_TF.dim(1);
  check_tensor(who, "a", a.a_TF, dtype, {T, F});
  check_tensor(who, "da", a.da_TF, dtype, {T, F});
  check_tensor(who, "dh", a.dh_T2F, dtype, {T, 2 * F});
  check_tensor(who, "h", a.h_T2F, dtype, {T, 2 * F});
  check_tensor(who, "w", a.w_DF.data, dtype, {D, F});
  OpScope scope(s, who, cost(a));
  if (a.a_TF.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::d_gated_down(s, a);
    case DeviceKind::cuda:
      return cuda::d_gated_down(s, a);
    case DeviceKind::null:
      return;
  }
}

Cost cost(const DGatedDown& a) {
  return {2.0 * static_cast<double>(a.a_TF.numel() * a.dy_TD.data.dim(1)),
          bytes_of(a.dy_TD.data) + bytes_of(a.w_DF.data) + bytes_of(a.h_T2F) + bytes_of(a.dh_T2F) + bytes_of(a.a_TF)};
}

}  // namespace moebius
