#include "device/cuda/cuda.h"
#include "ops/clamp/clamp.h"
#include "ops/clamp/clamp_backends.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

// A thread owns kNum elements.
template <class T, int kNum>
__global__ void __launch_bounds__(kThreads) clamp_fwd_kernel(T* y, const T* from, int64_t n, float limit) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum;
  if (i >= n) return;
  float x[kNum];
  load(x, from + i);
#pragma unroll
  for (int j = 0; j < kNum; ++j) x[j] = x[j] < -limit ? -limit : x[j] > limit ? limit : x[j];  // a NaN passes through
  store(y + i, x);
}

// A thread owns kNum elements.
template <class T, int kNum>
__global__ void __launch_bounds__(kThreads)
    clamp_bwd_kernel(T* dx, const T* dy, const T* from, int64_t n, float limit) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum;
  if (i >= n) return;
  float d[kNum], x[kNum];
  load(d, dy + i);
  load(x, from + i);
#pragma unroll
  for (int j = 0; j < kNum; ++j) d[j] = fabsf(x[j]) <= limit ? d[j] : 0.0f;
  store(dx + i, d);
}

}  // namespace

void clamp_fwd(Stream& s, const ClampFwd& a) {
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    T* y = a.y.ptr<T>();
    const T* x = a.x.ptr<T>();
    const int64_t n = a.x.numel();
    if (rows_are_aligned(n, sizeof(T), y, x))
      clamp_fwd_kernel<T, kNum><<<num_blocks(n / kNum, kThreads), kThreads, 0, cuda_stream(s)>>>(y, x, n, a.limit);
    else
      clamp_fwd_kernel<T, 1><<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(y, x, n, a.limit);
  });
  check_launch("clamp_fwd");
}

void clamp_bwd(Stream& s, const ClampBwd& a) {
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kNum = kPerVector<T>;
    T* dx = a.dx.ptr<T>();
    const T *dy = a.dy.ptr<T>(), *x = a.x.ptr<T>();
    const int64_t n = a.x.numel();
    if (rows_are_aligned(n, sizeof(T), dx, dy, x))
      clamp_bwd_kernel<T, kNum><<<num_blocks(n / kNum, kThreads), kThreads, 0, cuda_stream(s)>>>(dx, dy, x, n, a.limit);
    else
      clamp_bwd_kernel<T, 1><<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(dx, dy, x, n, a.limit);
  });
  check_launch("clamp_bwd");
}

}  // namespace moebius::cuda
