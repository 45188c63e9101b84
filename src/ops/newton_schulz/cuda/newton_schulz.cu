#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/newton_schulz/newton_schulz_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
constexpr double kNormEps = 1e-7;

// A thread owns one element.
template <class Z, class X>
__global__ void __launch_bounds__(kThreads)
    add_scaled_kernel(Z* z, const X* x, const Z* y, const double* sum_squares, int64_t n, float a, float b) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float factor = sum_squares ? static_cast<float>(a / (sqrt(*sum_squares) + kNormEps)) : a;
  float from[1], sum[1] = {0.0f};
  load(from, x + i);
  if (y) load(sum, y + i);
  sum[0] = factor * from[0] + b * sum[0];
  store(z + i, sum);
}

}  // namespace

void add_scaled(Stream& s, const AddScaled& a) {
  with_float_type(a.z.dtype, [&](auto of_z) {
    with_float_type(a.x.dtype, [&](auto of_x) {
      using Z = decltype(of_z);
      using X = decltype(of_x);
      const int64_t n = a.x.numel();
      const Z* y = a.y.empty() ? nullptr : a.y.ptr<Z>();
      const double* sum = a.sum_squares_1.empty() ? nullptr : a.sum_squares_1.ptr<double>();
      add_scaled_kernel<Z, X>
          <<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(a.z.ptr<Z>(), a.x.ptr<X>(), y, sum, n, a.a, a.b);
    });
  });
  check_launch("add_scaled");
}

}  // namespace moebius::cuda
