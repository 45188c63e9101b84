#include "ops/activation/activation.h"

#include "ops/activation/activation_backends.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 4;  // of a task

template <class T>
void fwd_row(T* a, const T* h, int64_t width) {
#pragma omp simd
  for (int64_t f = 0; f < width; ++f) {
    const float gate = to_f32(h[f]);
    a[f] = from_f32<T>(gate * sigmoid_f32(gate) * to_f32(h[width + f]));
  }
}

template <bool kWithA, class T>
void bwd_row(T* dh, T* a, const T* da, const T* h, int64_t width) {
#pragma omp simd
  for (int64_t f = 0; f < width; ++f) {
    const float gate = to_f32(h[f]), up = to_f32(h[width + f]), d = to_f32(da[f]);
    const float sigmoid = sigmoid_f32(gate), silu = gate * sigmoid;
    dh[f] = from_f32<T>(d * up * sigmoid * (1.0f + gate * (1.0f - sigmoid)));
    dh[width + f] = from_f32<T>(d * silu);
    if constexpr (kWithA) a[f] = from_f32<T>(silu * up);
  }
}

template <class T>
void fwd(Stream& s, const SwigluFwd& a) {
  const int64_t width = a.a_TF.dim(1);
  parallel_rows(s.pool(), a.a_TF.dim(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) fwd_row(a.a_TF.ptr<T>() + t * width, a.h_T2F.ptr<T>() + t * 2 * width, width);
  });
}

template <class T>
void bwd(Stream& s, const SwigluBwd& a) {
  const int64_t width = a.da_TF.dim(1);
  const bool with_a = !a.a_TF.empty();
  parallel_rows(s.pool(), a.da_TF.dim(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* dh = a.dh_T2F.ptr<T>() + t * 2 * width;
      const T* da = a.da_TF.ptr<T>() + t * width;
      const T* h = a.h_T2F.ptr<T>() + t * 2 * width;
      if (with_a)
        bwd_row<true, T>(dh, a.a_TF.ptr<T>() + t * width, da, h, width);
      else
        bwd_row<false, T>(dh, nullptr, da, h, width);
    }
  });
}

}  // namespace

void swiglu_fwd(Stream& s, const SwigluFwd& a) {
  with_float_type(a.h_T2F.dtype, [&](auto zero) { fwd<decltype(zero)>(s, a); });
}

void swiglu_bwd(Stream& s, const SwigluBwd& a) {
  with_float_type(a.h_T2F.dtype, [&](auto zero) { bwd<decltype(zero)>(s, a); });
}

}  // namespace moebius::cpu
