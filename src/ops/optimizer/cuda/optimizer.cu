#include "device/cuda/cuda.h"
#include "ops/cuda/tensors.h"
#include "ops/cuda/vector.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
// A piece is a chunk with a partial sum of its own.
struct Squares {
  const void* x;
  int64_t n, chunk;
  int first, num_partials;
  bool whole;    // in vectors of four
  bool is_bf16;  // else f32
};
static_assert(sizeof(Tensors<Squares>) <= 4000);

template <int kNum, class T>
__device__ double squares_of_thread(const T* x, int64_t begin, int64_t end) {
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
  return sums[0];
}

template <class T>
__device__ double squares_of_thread(const Squares& t, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(t.x);
  return t.whole ? squares_of_thread<4>(x, begin, end) : squares_of_thread<1>(x, begin, end);
}

__global__ void __launch_bounds__(kThreads)
    partial_squares_kernel(double* partial, const __grid_constant__ Tensors<Squares> tensors) {
  __shared__ double shared[32];
  const Squares& t = owner_of(tensors, blockIdx.x);
  const int64_t begin = (static_cast<int>(blockIdx.x) - t.first) * t.chunk, end = min(t.n, begin + t.chunk);
  const double mine = t.is_bf16 ? squares_of_thread<bf16>(t, begin, end) : squares_of_thread<float>(t, begin, end);
  const double sum = block_sum(mine, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Tensor by tensor, so that the order of the sum does not depend on which share a launch.
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(double* to, const double* partial, const __grid_constant__ Tensors<Squares> tensors) {
  __shared__ double shared[32];
  for (int i = 0; i < tensors.num; ++i) {
    const Squares& t = tensors.of[i];
    double sum = 0;
    for (int p = threadIdx.x; p < t.num_partials; p += kThreads) sum += partial[t.first + p];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *to += sum;
    __syncthreads();  // shared is free again
  }
}

__global__ void clip_scale_kernel(float* norm, float* scale, const double* sum_squares, float clip) {
  const double exact = sqrt(*sum_squares);
  const float seen = static_cast<float>(exact);
  // The caller gets the norm in f32: an infinite value there must stop the step, though a
  // double holds it.
  *norm = seen;
  *scale = !isfinite(seen) ? __int_as_float(0x7fc00000)
           : clip > 0      ? static_cast<float>(fmin(1.0, clip / (exact + 1e-6)))
                           : 1.0f;
}

}  // namespace

void sum_squares(Stream& s, const SumSquares& a) {
  double* partial = a.partial_P.ptr<double>();
  const auto make = [](const Tensor& x) {
    const int64_t n = x.numel(), num = SumSquares::num_partials(x);
    // Whole vectors, so that each chunk starts where one does.
    return Squares{.x = x.data,
                   .n = n,
                   .chunk = div_ceil(div_ceil(n, num), 4) * 4,
                   .num_partials = static_cast<int>(num),
                   .whole = is_whole(n, 4, static_cast<const char*>(x.data)),
                   .is_bf16 = x.dtype == DType::bf16};
  };
  const auto pieces = [](const Tensor& x) { return SumSquares::num_partials(x); };
  for_each_group<Squares>(a.x, make, pieces, [&](const Tensors<Squares>& group, int num_partials) {
    partial_squares_kernel<<<num_partials, kThreads, 0, cuda_stream(s)>>>(partial, group);
    add_partials_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(a.sum_1.ptr<double>(), partial, group);
    partial += num_partials;
  });
  check_launch("sum_squares");
}

void clip_scale(Stream& s, const ClipScale& a) {
  clip_scale_kernel<<<1, 1, 0, cuda_stream(s)>>>(a.norm_1.ptr<float>(), a.scale_1.ptr<float>(),
                                                 a.sum_squares_1.ptr<double>(), a.clip);
  check_launch("clip_scale");
}

}  // namespace moebius::cuda
