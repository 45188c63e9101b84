#include "device/cuda/cuda.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_sink.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A warp owns a row of one head.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sink_fwd_kernel(T* o, float* lse, const float* sink, int64_t num_rows, int64_t heads, int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (i >= num_rows) return;
  const int lane = threadIdx.x % 32;
  const float x = lse[i], y = sink[i % heads];
  const float kept = 1.0f / (1.0f + expf(y - x));
  __syncwarp();
  if (lane == 0) lse[i] = fmaxf(x, y) + log1pf(expf(-fabsf(x - y)));
  for (int64_t c = lane; c < width; c += 32) set(o[i * width + c], kept * element(o[i * width + c]));
}

// A block owns a head; its threads every so many rows each, added by a tree.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sink_bwd_kernel(float* dsink, const T* dout, const T* o, const float* lse, const float* sink, int64_t rows,
                    int64_t heads, int64_t width) {
  __shared__ float shared[32];
  const int64_t h = blockIdx.x;
  float sum = 0;
  for (int64_t t = threadIdx.x; t < rows; t += kThreads) {
    const int64_t i = t * heads + h;
    float product = 0;
    for (int64_t c = 0; c < width; ++c) product += element(dout[i * width + c]) * element(o[i * width + c]);
    sum += expf(sink[h] - lse[i]) * product;
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) dsink[h] -= sum;
}

}  // namespace

void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a) {
  const int64_t num_rows = a.lse_TH.numel();
  with_float_type(a.o_THd.dtype, [&]<class T>(T) {
    sink_fwd_kernel<T><<<num_blocks(num_rows, kWarps), kThreads, 0, cuda_stream(s)>>>(
        a.o_THd.ptr<T>(), a.lse_TH.ptr<float>(), a.sink_H.ptr<float>(), num_rows, a.o_THd.dim(1), a.o_THd.dim(2));
  });
  check_launch("attention_sink_fwd");
}

void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a) {
  with_float_type(a.o_THd.dtype, [&]<class T>(T) {
    sink_bwd_kernel<T><<<narrow<int>(a.o_THd.dim(1)), kThreads, 0, cuda_stream(s)>>>(
        a.dsink_H.ptr<float>(), a.do_THd.ptr<T>(), a.o_THd.ptr<T>(), a.lse_TH.ptr<float>(), a.sink_H.ptr<float>(),
        a.o_THd.dim(0), a.o_THd.dim(1), a.o_THd.dim(2));
  });
  check_launch("attention_sink_bwd");
}

}  // namespace moebius::cuda
