#include "ops/optimizer/optimizer.h"

#include "ops/optimizer/optimizer_backends.h"

namespace moebius {
namespace {

constexpr int64_t kChunk = 1 << 16;  // elements of a partial sum

}  // namespace

int64_t SumSquares::num_partials(const Tensor& x) { return div_ceil(x.numel(), kChunk); }

int64_t SumSquares::num_partials(std::span<const Tensor> x) {
  int64_t num = 0;
  for (const Tensor& each : x) num += num_partials(each);
  return num;
}

void sum_squares(Stream& s, const SumSquares& a) {
  const char* who = "sum_squares";
  for (const Tensor& x : a.x) check_tensor(who, "x", x, DType::f32, {x.numel()});
  check_tensor(who, "sum", a.sum_1, DType::f64, {1});
  check_tensor(who, "partial", a.partial_P, DType::f64, {SumSquares::num_partials(a.x)});
  OpScope scope(s, who, cost(a));
  if (a.partial_P.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::sum_squares(s, a);
    case DeviceKind::cuda:
      return cuda::sum_squares(s, a);
    case DeviceKind::null:
      return;
  }
}

Cost cost(const SumSquares& a) {
  Cost all;
  for (const Tensor& x : a.x) {
    all.flops += 2.0 * x.numel();
    all.bytes += static_cast<double>(x.num_bytes());
  }
  return all;
}

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
  for (const AdamWTensors& t : a.tensors) {
    const Shape n{t.master_n.numel()};
    check_tensor(who, "param", t.param_n, t.param_n.dtype == DType::bf16 ? DType::bf16 : DType::f32, n);
    check_tensor(who, "master", t.master_n, DType::f32, n);
    check_tensor(who, "m", t.m_n, DType::f32, n);
    check_tensor(who, "v", t.v_n, DType::f32, n);
    check_tensor(who, "grad", t.grad_n, DType::f32, n);
  }
  check_tensor(who, "scale", a.scale_1, DType::f32, {1});
  if (!a.lr_and_step_2.empty()) check_tensor(who, "lr_and_step", a.lr_and_step_2, DType::f64, {2});
  MOEBIUS_CHECK(usage, a.step >= 1, "{}: step counts from 1; got {}", who, a.step);
  OpScope scope(s, who, cost(a));
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
  Cost all;
  for (const AdamWTensors& t : a.tensors) {
    const bool own_param = t.param_n.dtype != DType::f32 || t.param_n.data != t.master_n.data;
    all.flops += 15.0 * t.master_n.numel();
    all.bytes += static_cast<double>(7 * t.master_n.num_bytes() + (own_param ? t.param_n.num_bytes() : 0));
  }
  return all;
}

void sgd(Stream& s, const Sgd& a) {
  const char* who = "sgd";
  for (const SgdTensors& t : a.tensors) {
    const Shape n{t.master_n.numel()};
    check_tensor(who, "param", t.param_n, t.param_n.dtype == DType::bf16 ? DType::bf16 : DType::f32, n);
    check_tensor(who, "master", t.master_n, DType::f32, n);
    if (a.momentum != 0) check_tensor(who, "m", t.m_n, DType::f32, n);
    check_tensor(who, "grad", t.grad_n, DType::f32, n);
  }
  check_tensor(who, "scale", a.scale_1, DType::f32, {1});
  if (!a.lr_and_step_2.empty()) check_tensor(who, "lr_and_step", a.lr_and_step_2, DType::f64, {2});
  OpScope scope(s, who, cost(a));
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::sgd(s, a);
    case DeviceKind::cuda:
      return cuda::sgd(s, a);
    case DeviceKind::null:
      return;
  }
}

// Master and m are read and written, grad is read; param is written unless it is the master.
Cost cost(const Sgd& a) {
  Cost all;
  for (const SgdTensors& t : a.tensors) {
    const bool own_param = t.param_n.dtype != DType::f32 || t.param_n.data != t.master_n.data;
    const int64_t accesses = a.momentum == 0 ? 3 : 5;
    all.flops += 6.0 * t.master_n.numel();
    all.bytes += static_cast<double>(accesses * t.master_n.num_bytes() + (own_param ? t.param_n.num_bytes() : 0));
  }
  return all;
}

}  // namespace moebius
