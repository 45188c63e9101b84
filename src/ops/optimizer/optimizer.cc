#include "ops/optimizer/optimizer.h"

#include "ops/backends.h"

namespace moebius {
namespace {

constexpr int64_t kChunk = 1 << 16;  // elements of a partial sum

}  // namespace

int64_t SumSquares::num_partials(int64_t n) { return div_ceil(n, kChunk); }

void sum_squares(Stream& s, const SumSquares& a) {
  const char* who = "sum_squares";
  const int64_t n = a.x_n.numel();
  check_tensor(who, "x", a.x_n, DType::f32, {n});
  check_tensor(who, "sum", a.sum_1, DType::f64, {1});
  check_tensor(who, "partial", a.partial_P, DType::f64, {SumSquares::num_partials(n)});
  OpScope scope(s, who, cost(a));
  if (n == 0) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::sum_squares(s, a);
    case DeviceKind::cuda:
      return cuda::sum_squares(s, a);
    case DeviceKind::null:
      return;
  }
}

Cost cost(const SumSquares& a) { return {2.0 * a.x_n.numel(), static_cast<double>(a.x_n.num_bytes())}; }

void clip_scale(Stream& s, const ClipScale& a) {
  const char* who = "clip_scale";
  check_tensor(who, "norm", a.norm_1, DType::f32, {1});
  check_tensor(who, "scale", a.scale_1, DType::f32, {1});
  check_tensor(who, "sum_squares", a.sum_squares_1, DType::f64, {1});
  MOEBIUS_CHECK(usage, a.clip >= 0, "{}: clip must not be negative; got {}; 0 turns clipping off", who, a.clip);
  OpScope scope(s, who, {4, 16});
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::clip_scale(s, a);
    case DeviceKind::cuda:
      return cuda::clip_scale(s, a);
    case DeviceKind::null:
      return;
  }
}

void adamw(Stream& s, const AdamW& a) {
  const char* who = "adamw";
  const Shape n{a.master_n.numel()};
  check_tensor(who, "param", a.param_n, a.param_n.dtype == DType::bf16 ? DType::bf16 : DType::f32, n);
  check_tensor(who, "master", a.master_n, DType::f32, n);
  check_tensor(who, "m", a.m_n, DType::f32, n);
  check_tensor(who, "v", a.v_n, DType::f32, n);
  check_tensor(who, "grad", a.grad_n, DType::f32, n);
  check_tensor(who, "scale", a.scale_1, DType::f32, {1});
  if (!a.schedule_2.empty()) check_tensor(who, "schedule", a.schedule_2, DType::f64, {2});
  MOEBIUS_CHECK(usage, a.step >= 1, "{}: step counts from 1; got {}", who, a.step);
  OpScope scope(s, who, cost(a));
  if (a.master_n.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::adamw(s, a);
    case DeviceKind::cuda:
      return cuda::adamw(s, a);
    case DeviceKind::null:
      return;
  }
}

// Master, m and v are read and written, grad is read; param is written unless it is the master.
Cost cost(const AdamW& a) {
  const bool own_param = a.param_n.dtype != DType::f32 || a.param_n.data != a.master_n.data;
  return {15.0 * a.master_n.numel(),
          static_cast<double>(7 * a.master_n.num_bytes() + (own_param ? a.param_n.num_bytes() : 0))};
}

}  // namespace moebius
