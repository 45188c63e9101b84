#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/activation/activation.h"
#include "ops/activation/activation_backends.h"
#include "ops/cuda/swiglu.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Fwd {
  T* a;
  const T* h;
  int64_t num_vectors;
  uint32_t vectors_of_row;  // of a
};

// The position of a thread's vector in a, and of its gate in h.
struct Place {
  int64_t a, gate;
};

template <int kNum>
__device__ __forceinline__ Place place_of(int64_t vector, uint32_t vectors_of_row) {
  return {vector * kNum, (vector + quotient(vector, vectors_of_row) * vectors_of_row) * kNum};
}

// A thread owns a vector of a.
template <class T, int kNum>
__global__ void __launch_bounds__(kThreads, 4) swiglu_fwd_kernel(Fwd<T> f) {
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= f.num_vectors) return;
  const auto [at, gate_at] = place_of<kNum>(vector, f.vectors_of_row);
  float gate[kNum], up[kNum];
  load(gate, f.h + gate_at);
  load(up, f.h + gate_at + int64_t{f.vectors_of_row} * kNum);
  float z[kNum];
  sigmoids_of<T>(z, gate);
#pragma unroll
  for (int i = 0; i < kNum; ++i) up[i] = swiglu(gate[i], z[i], up[i]);
  store(f.a + at, up);
}

template <class T>
struct Bwd {
  T *dh, *a;  // a may be null
  const T *da, *h;
  int64_t num_vectors;
  uint32_t vectors_of_row;
};

template <class T, int kNum>
__global__ void __launch_bounds__(kThreads, 4) swiglu_bwd_kernel(Bwd<T> b) {
  const int64_t vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= b.num_vectors) return;
  const auto [at, gate_at] = place_of<kNum>(vector, b.vectors_of_row);
  const int64_t up_at = gate_at + int64_t{b.vectors_of_row} * kNum;
  float gate[kNum], up[kNum], d[kNum], a[kNum];
  load(gate, b.h + gate_at);
  load(up, b.h + up_at);
  load(d, b.da + at);
  float z[kNum];
  sigmoids_of<T>(z, gate);
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    a[i] = swiglu(gate[i], z[i], up[i]);
    const SwigluGradient g = swiglu_gradient(d[i], gate[i], z[i], up[i]);
    gate[i] = g.dgate;
    up[i] = g.dup;
  }
  store(b.dh + gate_at, gate);
  store(b.dh + up_at, up);
  if (b.a) store(b.a + at, a);
}

}  // namespace

void swiglu_fwd(Stream& s, const SwigluFwd& a) {
  const int64_t width = a.a_TF.dim(1);
  with_float_type(a.h_T2F.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    Fwd<T> f{.a = a.a_TF.ptr<T>(), .h = a.h_T2F.ptr<T>()};
    const bool aligned = rows_are_aligned(width, sizeof(T), f.a, f.h);
    if (!aligned) note_odd_rows(s, "swiglu_fwd", a.h_T2F.dtype, width);
    f.num_vectors = a.a_TF.numel() / (aligned ? kNum : 1);
    f.vectors_of_row = static_cast<uint32_t>(narrow<int>(width / (aligned ? kNum : 1)));
    const int blocks = num_blocks(f.num_vectors, kThreads);
    if (aligned)
      swiglu_fwd_kernel<T, kNum><<<blocks, kThreads, 0, cuda_stream(s)>>>(f);
    else
      swiglu_fwd_kernel<T, 1><<<blocks, kThreads, 0, cuda_stream(s)>>>(f);
  });
  check_launch("swiglu_fwd");
}

void swiglu_bwd(Stream& s, const SwigluBwd& a) {
  const int64_t width = a.da_TF.dim(1);
  with_float_type(a.h_T2F.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    Bwd<T> b{.dh = a.dh_T2F.ptr<T>(),
             .a = a.a_TF.empty() ? nullptr : a.a_TF.ptr<T>(),
             .da = a.da_TF.ptr<T>(),
             .h = a.h_T2F.ptr<T>()};
    const bool aligned = rows_are_aligned(width, sizeof(T), b.dh, b.a, b.da, b.h);
    if (!aligned) note_odd_rows(s, "swiglu_bwd", a.h_T2F.dtype, width);
    b.num_vectors = a.da_TF.numel() / (aligned ? kNum : 1);
    b.vectors_of_row = static_cast<uint32_t>(narrow<int>(width / (aligned ? kNum : 1)));
    const int blocks = num_blocks(b.num_vectors, kThreads);
    if (aligned)
      swiglu_bwd_kernel<T, kNum><<<blocks, kThreads, 0, cuda_stream(s)>>>(b);
    else
      swiglu_bwd_kernel<T, 1><<<blocks, kThreads, 0, cuda_stream(s)>>>(b);
  });
  check_launch("swiglu_bwd");
}

}  // namespace moebius::cuda
