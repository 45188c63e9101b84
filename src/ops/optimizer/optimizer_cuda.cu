#include <algorithm>

#include "core/cuda.h"
#include "ops/backends.h"
#include "ops/cuda/vector.h"
#include "ops/optimizer/optimizer.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks of a large update: each works out the coefficients once, for many elements.
constexpr int kMaxBlocks = 132 * 8;

// A block owns a chunk.
template <int kNum>
__global__ void __launch_bounds__(kThreads)
    partial_squares_kernel(double* partial, const float* x, int64_t n, int64_t chunk) {
  __shared__ double shared[32];
  const int64_t begin = blockIdx.x * chunk, end = min(n, begin + chunk);
  double sums[kNum] = {};
#pragma unroll 8
  for (int64_t i = begin + threadIdx.x * kNum; i < end; i += kThreads * kNum) {
    float v[kNum];
    load(v, x + i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) sums[j] += static_cast<double>(v[j]) * static_cast<double>(v[j]);
  }
#pragma unroll
  for (int j = 1; j < kNum; ++j) sums[0] += sums[j];
  const double sum = block_sum(sums[0], shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(double* to, const double* partial, int64_t num_partials) {
  __shared__ double shared[32];
  double sum = 0;
  for (int64_t p = threadIdx.x; p < num_partials; p += kThreads) sum += partial[p];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *to += sum;
}

__global__ void clip_scale_kernel(float* norm, float* scale, const double* sum_squares, float clip) {
  const double exact = sqrt(*sum_squares);
  const float seen = static_cast<float>(exact);
  // The caller sees the norm in f32: what is infinite there must stop the step, though a double holds it.
  *norm = seen;
  *scale = !isfinite(seen) ? __int_as_float(0x7fc00000)
           : clip > 0      ? static_cast<float>(fmin(1.0, clip / (exact + 1e-6)))
                           : 1.0f;
}

template <class T>
struct Update {
  T* param;
  float *master, *m, *v;
  const float *grad, *scale;
  const double* schedule;  // [lr, step], or null
  int64_t n, step;
  float lr, beta1, beta2, eps, weight_decay;
};

// The scalars of a step, worked out in double.
struct Coefficients {
  float one_minus_beta1, one_minus_beta2, keep, rate, inverse_sqrt_v;
};

template <class T>
__device__ Coefficients coefficients_of(const Update<T>& u) {
  const float lr = u.schedule ? static_cast<float>(u.schedule[0]) : u.lr;
  const double step = u.schedule ? u.schedule[1] : static_cast<double>(u.step), beta1 = u.beta1, beta2 = u.beta2;
  return {.one_minus_beta1 = static_cast<float>(1.0 - beta1),
          .one_minus_beta2 = static_cast<float>(1.0 - beta2),
          .keep = static_cast<float>(1.0 - static_cast<double>(lr) * u.weight_decay),
          .rate = static_cast<float>(lr / (1.0 - pow(beta1, step))),
          .inverse_sqrt_v = static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, step)))};
}

// Blocks take turns, kNum elements a thread.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads, 4) adamw_kernel(Update<T> u) {
  __shared__ Coefficients shared;
  const float scale = *u.scale;
  if (isnan(scale)) return;
  if (threadIdx.x == 0) shared = coefficients_of(u);
  __syncthreads();
  const Coefficients c = shared;
  const int64_t step = int64_t{gridDim.x} * kThreads * kNum;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kNum; i < u.n; i += step) {
    float g[kNum], m[kNum], v[kNum], master[kNum];
    load(g, u.grad + i);
    load(m, u.m + i);
    load(v, u.v + i);
    load(master, u.master + i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
      g[j] *= scale;
      m[j] = u.beta1 * m[j] + c.one_minus_beta1 * g[j];
      v[j] = u.beta2 * v[j] + c.one_minus_beta2 * g[j] * g[j];
      master[j] = c.keep * master[j] - c.rate * m[j] / (sqrtf(v[j]) * c.inverse_sqrt_v + u.eps);
    }
    store(u.m + i, m);
    store(u.v + i, v);
    store(u.master + i, master);
    store(u.param + i, master);
  }
}

}  // namespace

void sum_squares(Stream& s, const SumSquares& a) {
  const int64_t n = a.x_n.numel(), num_partials = a.partial_P.numel();
  // Whole vectors, so that each chunk starts where one does.
  const int64_t chunk = div_ceil(div_ceil(n, num_partials), 4) * 4;
  const float* x = a.x_n.ptr<float>();
  double* partial = a.partial_P.ptr<double>();
  const int blocks = narrow<int>(num_partials);
  if (is_whole(n, 4, x))
    partial_squares_kernel<4><<<blocks, kThreads, 0, cuda_stream(s)>>>(partial, x, n, chunk);
  else
    partial_squares_kernel<1><<<blocks, kThreads, 0, cuda_stream(s)>>>(partial, x, n, chunk);
  add_partials_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(a.sum_1.ptr<double>(), partial, num_partials);
  check_launch("sum_squares");
}

void clip_scale(Stream& s, const ClipScale& a) {
  clip_scale_kernel<<<1, 1, 0, cuda_stream(s)>>>(a.norm_1.ptr<float>(), a.scale_1.ptr<float>(),
                                                 a.sum_squares_1.ptr<double>(), a.clip);
  check_launch("clip_scale");
}

void adamw(Stream& s, const AdamW& a) {
  with_float_type(a.param_n.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Update<T> u{.param = a.param_n.ptr<T>(),
                      .master = a.master_n.ptr<float>(),
                      .m = a.m_n.ptr<float>(),
                      .v = a.v_n.ptr<float>(),
                      .grad = a.grad_n.ptr<float>(),
                      .scale = a.scale_1.ptr<float>(),
                      .schedule = a.schedule_2.empty() ? nullptr : a.schedule_2.ptr<double>(),
                      .n = a.master_n.numel(),
                      .step = a.step,
                      .lr = a.lr,
                      .beta1 = a.beta1,
                      .beta2 = a.beta2,
                      .eps = a.eps,
                      .weight_decay = a.weight_decay};
    const bool whole = is_whole(u.n, 4, u.param, u.master, u.m, u.v, u.grad);
    const int64_t wanted = div_ceil(u.n, int64_t{kThreads} * (whole ? 4 : 1));
    const int blocks = static_cast<int>(std::min<int64_t>(wanted, kMaxBlocks));
    if (whole)
      adamw_kernel<4><<<blocks, kThreads, 0, cuda_stream(s)>>>(u);
    else
      adamw_kernel<1><<<blocks, kThreads, 0, cuda_stream(s)>>>(u);
  });
  check_launch("adamw");
}

}  // namespace moebius::cuda
