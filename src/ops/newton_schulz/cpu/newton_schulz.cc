#include "ops/newton_schulz/newton_schulz.h"

#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/newton_schulz/newton_schulz_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements of a task
constexpr double kNormEps = 1e-7;

float factor_of(const AddScaled& a, int64_t row) {
  if (a.sum_squares_B.empty()) return a.a;
  return static_cast<float>(a.a / (std::sqrt(a.sum_squares_B.ptr<double>()[row]) + kNormEps));
}

template <class Z, class X>
void add_scaled_of(ThreadPool& pool, const AddScaled& a) {
  const int64_t rows = a.sum_squares_B.empty() ? 1 : a.x.dim(0), numel = a.x.numel() / rows;
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = factor_of(a, row), b = a.b;
    Z* z = a.z.ptr<Z>() + row * numel;
    const X* x = a.x.ptr<X>() + row * numel;
    const Z* y = a.y.empty() ? nullptr : a.y.ptr<Z>() + row * numel;
    parallel_rows(pool, numel, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float sum = y ? b * to_f32(y[i]) : 0.0f;
        z[i] = from_f32<Z>(factor * to_f32(x[i]) + sum);
      }
    });
  }
}

}  // namespace

void add_scaled(Stream& s, const AddScaled& a) {
  with_float_type(a.z.dtype, [&](auto z) {
    with_float_type(a.x.dtype, [&](auto x) { add_scaled_of<decltype(z), decltype(x)>(s.pool(), a); });
  });
}

}  // namespace moebius::cpu
