#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/newton_schulz/newton_schulz_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;  // elements of a thread, where they are aligned
constexpr double kNormEps = 1e-7;

// A thread owns kNum elements of a row of n.
template <int kNum, class Z, class X>
__global__ void __launch_bounds__(kThreads)
    add_scaled_kernel(Z* z, const X* x, const Z* y, const double* sum_squares, int64_t n, float a, float b) {
  const int64_t in_row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum, i = blockIdx.y * n + in_row;
  if (in_row >= n) return;
  const float factor = sum_squares ? static_cast<float>(a / (sqrt(sum_squares[blockIdx.y]) + kNormEps)) : a;
  float from[kNum], sum[kNum] = {};
  load(from, x + i);
  if (y) load(sum, y + i);
#pragma unroll
  for (int j = 0; j < kNum; ++j) sum[j] = factor * from[j] + b * sum[j];
  store(z + i, sum);
}

template <int kNum, class Z, class X>
void launch(cudaStream_t stream, const AddScaled& a) {
  const int64_t rows = a.sum_squares_B.empty() ? 1 : a.x.dim(0), n = a.x.numel() / rows;
  const Z* y = a.y.empty() ? nullptr : a.y.ptr<Z>();
  const double* sums = a.sum_squares_B.empty() ? nullptr : a.sum_squares_B.ptr<double>();
  const dim3 blocks(static_cast<unsigned>(num_blocks(n, int64_t{kThreads} * kNum)), static_cast<unsigned>(rows));
  add_scaled_kernel<kNum, Z, X><<<blocks, kThreads, 0, stream>>>(a.z.ptr<Z>(), a.x.ptr<X>(), y, sums, n, a.a, a.b);
}

}  // namespace

void add_scaled(Stream& s, const AddScaled& a) {
  with_float_type(a.z.dtype, [&](auto of_z) {
    with_float_type(a.x.dtype, [&](auto of_x) {
      using Z = decltype(of_z);
      using X = decltype(of_x);
      const int64_t row = a.sum_squares_B.empty() ? a.x.numel() : a.x.numel() / a.x.dim(0);
      const Z* y = a.y.empty() ? a.z.ptr<Z>() : a.y.ptr<Z>();
      const bool whole = is_whole(row, kPerThread, a.z.ptr<Z>(), a.x.ptr<X>(), y);
      whole ? launch<kPerThread, Z, X>(cuda_stream(s), a) : launch<1, Z, X>(cuda_stream(s), a);
    });
  });
  check_launch("add_scaled");
}

}  // namespace moebius::cuda
