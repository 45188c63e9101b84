#include <cmath>

#include "ops/clamp/clamp.h"
#include "ops/clamp/clamp_backends.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements of a task

}  // namespace

// It compares explicitly, since std::min and std::max would lose a NaN in one of their arguments.
void clamp_fwd(Stream& s, const ClampFwd& a) {
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* y = a.y.ptr<T>();
    const T* from = a.x.ptr<T>();
    parallel_rows(s.pool(), a.x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float x = to_f32(from[i]);
        y[i] = from_f32<T>(x < -a.limit ? -a.limit : x > a.limit ? a.limit : x);
      }
    });
  });
}

void clamp_bwd(Stream& s, const ClampBwd& a) {
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* dx = a.dx.ptr<T>();
    const T *dy = a.dy.ptr<T>(), *x = a.x.ptr<T>();
    parallel_rows(s.pool(), a.x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        dx[i] = from_f32<T>(std::abs(to_f32(x[i])) <= a.limit ? to_f32(dy[i]) : 0.0f);
    });
  });
}

}  // namespace moebius::cpu
