#include "ops/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/vector.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cpu {
namespace {

// The scalars of a step, worked out in double once.
struct Coefficients {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, keep, rate, inverse_sqrt_v, eps;

  Coefficients(const AdamW& a, float weight_decay)
      : beta1(a.beta1),
        one_minus_beta1(static_cast<float>(1.0 - double{a.beta1})),
        beta2(a.beta2),
        one_minus_beta2(static_cast<float>(1.0 - double{a.beta2})),
        keep(static_cast<float>(1.0 - double{a.lr} * weight_decay)),
        rate(static_cast<float>(a.lr / (1.0 - std::pow(double{a.beta1}, static_cast<double>(a.step))))),
        inverse_sqrt_v(
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(double{a.beta2}, static_cast<double>(a.step))))),
        eps(a.eps) {}
};

template <class T>
void update(T* param, float* master, float* m, float* v, const float* grad, int64_t n, float scale,
            const Coefficients c) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    m[i] = c.beta1 * m[i] + c.one_minus_beta1 * g;
    v[i] = c.beta2 * v[i] + c.one_minus_beta2 * g * g;
    master[i] = c.keep * master[i] - c.rate * m[i] / (std::sqrt(v[i]) * c.inverse_sqrt_v + c.eps);
    param[i] = from_f32<T>(master[i]);
  }
}

// m is null without momentum.
template <class T>
void update_sgd(T* param, float* master, float* m, const float* grad, int64_t n, float scale, float momentum,
                float keep, float lr) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float change = grad[i] * scale;
    if (m) change = m[i] = momentum * m[i] + change;
    master[i] = keep * master[i] - lr * change;
    param[i] = from_f32<T>(master[i]);
  }
}

// In 32 sums, so that it is bound by memory and not by the latency of one.
double squares_of(const float* x, int64_t n) {
  constexpr int64_t kSums = 32;
  double sums[kSums] = {}, rest = 0;
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
#pragma omp simd
    for (int64_t j = 0; j < kSums; ++j) sums[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (; i < n; ++i) rest += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (const double sum : sums) rest += sum;
  return rest;
}

}  // namespace

void sum_squares(Stream& s, const SumSquares& a) {
  double* partial = a.partial_P.ptr<double>();
  for (const Tensor& tensor : a.x) {
    const int64_t n = tensor.numel(), num_partials = SumSquares::num_partials(tensor);
    if (n == 0) continue;
    const int64_t chunk = div_ceil(n, num_partials);
    const float* x = tensor.ptr<float>();
    s.pool().run(num_partials, [&](int64_t p, int) {
      const int64_t begin = p * chunk;
      partial[p] = squares_of(x + begin, std::min(n, begin + chunk) - begin);
    });
    for (int64_t p = 0; p < num_partials; ++p) *a.sum_1.ptr<double>() += partial[p];
    partial += num_partials;
  }
}

void clip_scale(Stream&, const ClipScale& a) {
  const double norm = std::sqrt(*a.sum_squares_1.ptr<double>());
  float scale = a.clip > 0 ? static_cast<float>(std::min(1.0, a.clip / (norm + 1e-6))) : 1.0f;
  // The caller sees the norm in f32: what is infinite there must stop the step, though a
  // double holds it.
  const float seen = static_cast<float>(norm);
  if (!std::isfinite(seen)) scale = std::numeric_limits<float>::quiet_NaN();
  *a.norm_1.ptr<float>() = seen;
  *a.scale_1.ptr<float>() = scale;
}

void adamw(Stream& s, const AdamW& a) {
  const float scale = *a.scale_1.ptr<float>();
  if (std::isnan(scale)) return;
  AdamW now = a;
  if (!a.lr_and_step_2.empty()) {
    now.lr = static_cast<float>(a.lr_and_step_2.ptr<double>()[0]);
    now.step = static_cast<int64_t>(a.lr_and_step_2.ptr<double>()[1]);
  }
  for (const AdamWTensors& t : a.tensors) {
    const Coefficients coefficients(now, t.weight_decay);
    with_float_type(t.param_n.dtype, [&](auto zero) {
      using T = decltype(zero);
      parallel_rows(s.pool(), t.master_n.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
        update(t.param_n.ptr<T>() + begin, t.master_n.ptr<float>() + begin, t.m_n.ptr<float>() + begin,
               t.v_n.ptr<float>() + begin, t.grad_n.ptr<float>() + begin, end - begin, scale, coefficients);
      });
    });
  }
}

void sgd(Stream& s, const Sgd& a) {
  const float scale = *a.scale_1.ptr<float>();
  if (std::isnan(scale)) return;
  const float lr = a.lr_and_step_2.empty() ? a.lr : static_cast<float>(a.lr_and_step_2.ptr<double>()[0]);
  for (const SgdTensors& t : a.tensors) {
    const float keep = static_cast<float>(1.0 - double{lr} * t.weight_decay);
    with_float_type(t.param_n.dtype, [&](auto zero) {
      using T = decltype(zero);
      parallel_rows(s.pool(), t.master_n.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
        float* m = a.momentum == 0 ? nullptr : t.m_n.ptr<float>() + begin;
        update_sgd(t.param_n.ptr<T>() + begin, t.master_n.ptr<float>() + begin, m, t.grad_n.ptr<float>() + begin,
                   end - begin, scale, a.momentum, keep, lr);
      });
    });
  }
}

}  // namespace moebius::cpu
