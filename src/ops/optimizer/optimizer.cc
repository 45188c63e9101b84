#include "ops/optimizer/optimizer.h"

#include "core/block_code.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius {
namespace {

constexpr int64_t kChunk = 1 << 16;  // elements of a partial sum

DType f32_or_bf16(const Tensor& t) { return t.dtype == DType::bf16 ? DType::bf16 : DType::f32; }

DType moment_dtype(const Tensor& t) { return t.dtype == DType::u8 ? DType::u8 : f32_or_bf16(t); }

// The scales of moments in 8-bit blocks.
void check_scales(const char* who, const UpdatedTensor& t, int num_moments) {
  const int64_t n = t.param_n.numel();
  if (t.m_n.dtype != DType::u8 || t.m_n.empty()) return;
  MOEBIUS_CHECK(usage, n % kCodeBlock == 0, "{}: expected a multiple of {} elements for 8-bit blocks; got {}", who,
                kCodeBlock, n);
  check_tensor(who, "m_scale", t.m_scale_b, DType::f32, {n / kCodeBlock});
  if (num_moments > 1) check_tensor(who, "v_scale", t.v_scale_b, DType::f32, {n / kCodeBlock});
  for (const Tensor* each : {&t.param_n, &t.master_n, &t.remainder_n, &t.m_n, &t.v_n, &t.grad_n})
    MOEBIUS_CHECK(usage, reinterpret_cast<uintptr_t>(each->data) % 16 == 0,
                  "{}: expected tensors at multiples of 16 bytes with 8-bit blocks; got another address", who);
}

void check_updated(const char* who, const UpdatedTensor& t, int num_moments) {
  const Shape n{t.param_n.numel()};
  const bool by_itself = t.master_n.empty() && !t.param_n.empty();
  check_tensor(who, "param", t.param_n, by_itself ? DType::bf16 : f32_or_bf16(t.param_n), n);
  if (!t.master_n.empty()) check_tensor(who, "master", t.master_n, DType::f32, n);
  if (!t.remainder_n.empty()) check_tensor(who, "remainder", t.remainder_n, DType::u16, n);
  if (num_moments > 0) check_tensor(who, "m", t.m_n, moment_dtype(t.m_n), n);
  if (num_moments > 1) check_tensor(who, "v", t.v_n, t.m_n.dtype, n);
  check_scales(who, t, num_moments);
  check_tensor(who, "grad", t.grad_n, f32_or_bf16(t.grad_n), n);
  MOEBIUS_CHECK(usage, t.master_n.empty() || t.remainder_n.empty(),
                "{}: expected a master or a remainder of each tensor; got both", who);
  MOEBIUS_CHECK(usage, t.draws.run >= 1, "{}: expected runs of at least one element; got {}", who, t.draws.run);
}

void check_step(const char* who, const Tensor& scale_1, const Tensor& lr_and_step_2, int64_t step) {
  check_tensor(who, "scale", scale_1, DType::f32, {1});
  if (!lr_and_step_2.empty()) check_tensor(who, "lr_and_step", lr_and_step_2, DType::f64, {2});
  MOEBIUS_CHECK(usage, step >= 1, "{}: step counts from 1; got {}", who, step);
}

// Values and moments are read and written, grad is read. A param that is rounded from a master of its
// own is written, and one without a master is a value.
Cost cost_of(std::span<const UpdatedTensor> tensors, double flops) {
  Cost all;
  for (const UpdatedTensor& t : tensors) {
    const bool is_value = t.master_n.empty();
    const bool is_master = t.param_n.dtype == DType::f32 && t.param_n.data == t.master_n.data;
    int64_t bytes = t.grad_n.num_bytes() + (is_value ? 2 : is_master ? 0 : 1) * t.param_n.num_bytes();
    for (const Tensor* both : {&t.master_n, &t.remainder_n, &t.m_n, &t.v_n, &t.m_scale_b, &t.v_scale_b}) {
      if (!both->empty()) bytes += 2 * both->num_bytes();
    }
    all.flops += flops * static_cast<double>(t.param_n.numel());
    all.bytes += static_cast<double>(bytes);
  }
  return all;
}

}  // namespace

bool UpdatedTensor::draws_bits() const {
  return (!m_n.empty() && m_n.dtype != DType::f32) || (master_n.empty() && remainder_n.empty());
}

int64_t SumSquares::num_partials(const Tensor& x) { return div_ceil(x.numel(), kChunk); }

int64_t SumSquares::num_partials(std::span<const Tensor> x) {
  int64_t num = 0;
  for (const Tensor& each : x) num += num_partials(each);
  return num;
}

void sum_squares(Stream& s, const SumSquares& a) {
  const char* who = "sum_squares";
  for (const Tensor& x : a.x) check_tensor(who, "x", x, f32_or_bf16(x), {x.numel()});
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
  for (const UpdatedTensor& t : a.tensors) check_updated(who, t, 2);
  check_step(who, a.scale_1, a.lr_and_step_2, a.step);
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

Cost cost(const AdamW& a) { return cost_of(a.tensors, 15); }

void sgd(Stream& s, const Sgd& a) {
  const char* who = "sgd";
  for (const UpdatedTensor& t : a.tensors) check_updated(who, t, a.momentum == 0 ? 0 : 1);
  check_step(who, a.scale_1, a.lr_and_step_2, a.step);
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

Cost cost(const Sgd& a) { return cost_of(a.tensors, 6); }

void sum_gradient(Stream& s, const SumGradient& a) {
  const char* who = "sum_gradient";
  check_tensor(who, "sum", a.sum_n, DType::bf16, {a.grad_n.numel()});
  check_tensor(who, "grad", a.grad_n, DType::f32, {a.grad_n.numel()});
  OpScope scope(s, who, {0, (a.adds ? 8.0 : 6.0) * static_cast<double>(a.grad_n.numel())});
  if (a.grad_n.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::sum_gradient(s, a);
    case DeviceKind::cuda:
      return cuda::sum_gradient(s, a);
    case DeviceKind::null:
      return;
  }
}

void join_master(Stream& s, const JoinMaster& a) {
  const char* who = "join_master";
  const Shape n{a.master_n.numel()};
  check_tensor(who, "master", a.master_n, DType::f32, n);
  check_tensor(who, "weight", a.weight_n, DType::bf16, n);
  check_tensor(who, "remainder", a.remainder_n, DType::u16, n);
  OpScope scope(s, who, {0, 8.0 * static_cast<double>(a.master_n.numel())});
  if (a.master_n.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::join_master(s, a);
    case DeviceKind::cuda:
      return cuda::join_master(s, a);
    case DeviceKind::null:
      return;
  }
}

void split_master(Stream& s, const SplitMaster& a) {
  const char* who = "split_master";
  const Shape n{a.master_n.numel()};
  check_tensor(who, "master", a.master_n, DType::f32, n);
  check_tensor(who, "weight", a.weight_n, DType::bf16, n);
  if (!a.remainder_n.empty()) check_tensor(who, "remainder", a.remainder_n, DType::u16, n);
  OpScope scope(s, who, {0, 8.0 * static_cast<double>(a.master_n.numel())});
  if (a.master_n.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::split_master(s, a);
    case DeviceKind::cuda:
      return cuda::split_master(s, a);
    case DeviceKind::null:
      return;
  }
}

}  // namespace moebius
