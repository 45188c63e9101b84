// The updates of AdamW and SGD. Where master and moments are f32 they are updated in place. Other
// forms become f32 in blocks that stay in the cache, are updated by the same loop, and are stored again.
#include <algorithm>
#include <cmath>

#include "core/block_code.h"
#include "ops/cpu/vector.h"
#include "ops/optimizer/cpu/stored_masters.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cpu {
namespace {

// The scalars of a step, computed once in double.
struct AdamWRule {
  float scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, rate, inverse_sqrt_v, eps;

  AdamWRule(const AdamW& a, float scale, float weight_decay)
      : scale(scale),
        beta1(a.beta1),
        one_minus_beta1(static_cast<float>(1.0 - double{a.beta1})),
        beta2(a.beta2),
        one_minus_beta2(static_cast<float>(1.0 - double{a.beta2})),
        keep(static_cast<float>(1.0 - double{a.lr} * weight_decay)),
        rate(static_cast<float>(a.lr / (1.0 - std::pow(double{a.beta1}, static_cast<double>(a.step))))),
        inverse_sqrt_v(
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(double{a.beta2}, static_cast<double>(a.step))))),
        eps(a.eps) {}

  template <class T>
  void update(T* param, float* master, float* m, float* v, const float* grad, int64_t n) const {
    const AdamWRule c = *this;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float g = grad[i] * c.scale;
      m[i] = c.beta1 * m[i] + c.one_minus_beta1 * g;
      v[i] = c.beta2 * v[i] + c.one_minus_beta2 * g * g;
      master[i] = c.keep * master[i] - c.rate * m[i] / (std::sqrt(v[i]) * c.inverse_sqrt_v + c.eps);
      param[i] = from_f32<T>(master[i]);
    }
  }
};

struct SgdRule {
  float scale, momentum, keep, lr;

  SgdRule(const Sgd& a, float scale, float weight_decay)
      : scale(scale), momentum(a.momentum), keep(static_cast<float>(1.0 - double{a.lr} * weight_decay)), lr(a.lr) {}

  template <class T>
  void update(T* param, float* master, float* m, float*, const float* grad, int64_t n) const {
    if (m) return update_with_momentum(param, master, m, grad, n);
    const SgdRule c = *this;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      master[i] = c.keep * master[i] - c.lr * (grad[i] * c.scale);
      param[i] = from_f32<T>(master[i]);
    }
  }

 private:
  template <class T>
  void update_with_momentum(T* param, float* master, float* m, const float* grad, int64_t n) const {
    const SgdRule c = *this;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      m[i] = c.momentum * m[i] + grad[i] * c.scale;
      master[i] = c.keep * master[i] - c.lr * m[i];
      param[i] = from_f32<T>(master[i]);
    }
  }
};

void load_moment(float* to, const Tensor& from, const Tensor& scales, BlockCode code, int64_t begin, int64_t n) {
  if (from.dtype != DType::u8) return load(to, from, begin, n);
  decode_blocks(code, to, from.ptr<uint8_t>() + begin, scales.ptr<float>() + begin / kCodeBlock, n);
}

void store_moment(const Tensor& to, const Tensor& scales, BlockCode code, const float* from, const uint32_t* draws,
                  int64_t begin, int64_t n) {
  if (to.dtype != DType::u8) return store(to, from, draws, begin, n);
  encode_blocks(code, to.ptr<uint8_t>() + begin, scales.ptr<float>() + begin / kCodeBlock, from, draws, n);
}

template <class Rule>
void update_in_blocks(const Rule& rule, const UpdatedTensor& t, int64_t step, int64_t begin, int64_t end) {
  float master[kBlock], m[kBlock], v[kBlock], grad[kBlock];
  DrawnBits draws(t.draws, step);
  const bool has_m = !t.m_n.empty(), has_v = !t.v_n.empty();
  for (; begin < end; begin += kBlock) {
    const int64_t n = std::min(kBlock, end - begin);
    load_master(master, t, begin, n);
    if (has_m) load_moment(m, t.m_n, t.m_scale_b, BlockCode::with_sign, begin, n);
    if (has_v) load_moment(v, t.v_n, t.v_scale_b, BlockCode::without_sign, begin, n);
    load(grad, t.grad_n, begin, n);
    rule.update(master, master, has_m ? m : nullptr, v, grad, n);
    if (t.draws_bits()) draws.fill(begin, n);
    if (has_m) store_moment(t.m_n, t.m_scale_b, BlockCode::with_sign, m, draws.m, begin, n);
    if (has_v) store_moment(t.v_n, t.v_scale_b, BlockCode::without_sign, v, draws.v, begin, n);
    store_master(t, master, draws.weight, begin, n);
  }
}

template <class Rule>
void update_in_place(const Rule& rule, const UpdatedTensor& t, int64_t begin, int64_t end) {
  const auto at = [&](const Tensor& x) { return x.empty() ? nullptr : x.ptr<float>() + begin; };
  with_float_type(t.param_n.dtype, [&]<class T>(T) {
    rule.update(t.param_n.ptr<T>() + begin, at(t.master_n), at(t.m_n), at(t.v_n), at(t.grad_n), end - begin);
  });
}

bool reads_lr(const AdamW&) { return true; }
bool reads_lr(const Sgd& a) { return a.reads_lr; }

template <class Rule, class Op>
void update_all(Stream& s, const Op& a) {
  const float scale = *a.scale_1.template ptr<float>();
  if (std::isnan(scale)) return;
  Op now = a;
  if (!a.lr_and_step_2.empty()) {
    if (reads_lr(a)) now.lr = static_cast<float>(a.lr_and_step_2.template ptr<double>()[0]);
    now.step = static_cast<int64_t>(a.lr_and_step_2.template ptr<double>()[1]);
  }
  for (const UpdatedTensor& t : a.tensors) {
    const Rule rule(now, scale, t.weight_decay);
    const bool in_place =
        !t.master_n.empty() && (t.m_n.empty() || t.m_n.dtype == DType::f32) && t.grad_n.dtype == DType::f32;
    // In whole blocks, which no thread shares with another.
    parallel_rows(s.pool(), div_ceil(t.param_n.numel(), kBlock), 64, [&](int64_t first, int64_t last) {
      const int64_t begin = first * kBlock, end = std::min(t.param_n.numel(), last * kBlock);
      in_place ? update_in_place(rule, t, begin, end) : update_in_blocks(rule, t, now.step, begin, end);
    });
  }
}

}  // namespace

void adamw(Stream& s, const AdamW& a) { update_all<AdamWRule>(s, a); }

void sgd(Stream& s, const Sgd& a) { update_all<SgdRule>(s, a); }

void sum_gradient(Stream& s, const SumGradient& a) {
  bf16* sum = a.sum_n.ptr<bf16>();
  const float* grad = a.grad_n.ptr<float>();
  parallel_rows(s.pool(), a.grad_n.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    if (a.adds)
      for (int64_t i = begin; i < end; ++i) sum[i] = to_bf16(to_f32(sum[i]) + grad[i]);
    else
      for (int64_t i = begin; i < end; ++i) sum[i] = to_bf16(grad[i]);
  });
}

void join_master(Stream& s, const JoinMaster& a) {
  parallel_rows(s.pool(), a.master_n.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    join(a.master_n.ptr<float>() + begin, a.weight_n.ptr<bf16>() + begin, a.remainder_n.ptr<uint16_t>() + begin,
         end - begin);
  });
}

void split_master(Stream& s, const SplitMaster& a) {
  parallel_rows(s.pool(), a.master_n.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    uint16_t* remainder = a.remainder_n.empty() ? nullptr : a.remainder_n.ptr<uint16_t>() + begin;
    split_all(a.weight_n.ptr<bf16>() + begin, remainder, a.master_n.ptr<float>() + begin, end - begin);
  });
}

}  // namespace moebius::cpu
