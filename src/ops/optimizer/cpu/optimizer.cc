#include "ops/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/vector.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cpu {
namespace {

// It adds to 32 sums, so that memory and not the latency of one sum is the limit.
template <class T>
double squares_of(const T* x, int64_t n) {
  const auto at = [&](int64_t i) { return static_cast<double>(to_f32(x[i])); };
  constexpr int64_t kSums = 32;
  double sums[kSums] = {}, rest = 0;
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
#pragma omp simd
    for (int64_t j = 0; j < kSums; ++j) sums[j] += at(i + j) * at(i + j);
  }
  for (; i < n; ++i) rest += at(i) * at(i);
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
    s.pool().run(num_partials, [&](int64_t p, int) {
      const int64_t begin = p * chunk, count = std::min(n, begin + chunk) - begin;
      with_float_type(tensor.dtype, [&]<class T>(T) { partial[p] = squares_of(tensor.ptr<T>() + begin, count); });
    });
    for (int64_t p = 0; p < num_partials; ++p) *a.sum_1.ptr<double>() += partial[p];
    partial += num_partials;
  }
}

void clip_scale(Stream&, const ClipScale& a) {
  const double norm = std::sqrt(*a.sum_squares_1.ptr<double>());
  float scale = a.clip > 0 ? static_cast<float>(std::min(1.0, a.clip / (norm + 1e-6))) : 1.0f;
  // The caller gets the norm in f32: an infinite value there must stop the step, though a
  // double holds it.
  const float seen = static_cast<float>(norm);
  if (!std::isfinite(seen)) scale = std::numeric_limits<float>::quiet_NaN();
  *a.norm_1.ptr<float>() = seen;
  *a.scale_1.ptr<float>() = scale;
}

}  // namespace moebius::cpu
