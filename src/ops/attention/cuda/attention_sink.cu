#include "device/cuda/cuda.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_sink.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256, kBwdThreads = 1024, kLanesOfRow = 8;

// Eight lanes own a row of one head.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads)
    sink_fwd_kernel(T* o, float* lse, const float* sink, int64_t num_rows, int64_t heads, int64_t width) {
  const int64_t i = int64_t{blockIdx.x} * (kThreads / kLanesOfRow) + threadIdx.x / kLanesOfRow;
  const int lane = threadIdx.x % kLanesOfRow;
  const float x = i < num_rows ? lse[i] : 0.0f, y = i < num_rows ? sink[i % heads] : 0.0f;
  const float kept = 1.0f / (1.0f + expf(y - x));
  __syncwarp();  // lse is written after all lanes have read it
  if (i >= num_rows) return;
  if (lane == 0) lse[i] = fmaxf(x, y) + log1pf(expf(-fabsf(x - y)));
  for (int64_t c = lane * kNum; c < width; c += kLanesOfRow * kNum) {
    float values[kNum];
    load<kNum>(values, o + i * width + c);
#pragma unroll
    for (int j = 0; j < kNum; ++j) values[j] *= kept;
    store<kNum>(o + i * width + c, values);
  }
}

// Returns the share of one of kLanesOfRow lanes in <x, y> of a row.
template <int kNum, class T>
__device__ __forceinline__ float lane_product(const T* x, const T* y, int64_t width, int lane) {
  float sum = 0;
  for (int64_t c = lane * kNum; c < width; c += kLanesOfRow * kNum) {
    float a[kNum], b[kNum];
    load<kNum>(a, x + c);
    load<kNum>(b, y + c);
#pragma unroll
    for (int i = 0; i < kNum; ++i) sum = fmaf(a[i], b[i], sum);
  }
  return sum;
}

// A block owns a head, and eight lanes a row at a time. The rows of a lane are added in order, then the
// lanes by a tree.
template <int kNum, class T>
__global__ void __launch_bounds__(kBwdThreads)
    sink_bwd_kernel(float* dsink, const T* dout, const T* o, const float* lse, const float* sink, int64_t rows,
                    int64_t heads, int64_t width) {
  __shared__ float shared[32];
  const int64_t h = blockIdx.x;
  const int lane = threadIdx.x % kLanesOfRow;
  float sum = 0;
#pragma unroll 4
  for (int64_t t = threadIdx.x / kLanesOfRow; t < rows; t += kBwdThreads / kLanesOfRow) {
    const int64_t i = t * heads + h;
    sum = fmaf(expf(sink[h] - lse[i]), lane_product<kNum>(dout + i * width, o + i * width, width, lane), sum);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) dsink[h] -= sum;
}

}  // namespace

void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a) {
  const int64_t num_rows = a.lse_TH.numel();
  with_float_type(a.o_THd.dtype, [&]<class T>(T) {
    const int64_t width = a.o_THd.dim(2);
    constexpr int kNum = kPerVector<T>;
    const auto kernel =
        rows_are_aligned(width, sizeof(T), a.o_THd.ptr<T>()) ? sink_fwd_kernel<kNum, T> : sink_fwd_kernel<1, T>;
    kernel<<<num_blocks(num_rows, kThreads / kLanesOfRow), kThreads, 0, cuda_stream(s)>>>(
        a.o_THd.ptr<T>(), a.lse_TH.ptr<float>(), a.sink_H.ptr<float>(), num_rows, a.o_THd.dim(1), width);
  });
  check_launch("attention_sink_fwd");
}

void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a) {
  with_float_type(a.o_THd.dtype, [&]<class T>(T) {
    const int64_t width = a.o_THd.dim(2);
    constexpr int kNum = kPerVector<T>;
    const auto kernel = rows_are_aligned(width, sizeof(T), a.do_THd.ptr<T>(), a.o_THd.ptr<T>())
                            ? sink_bwd_kernel<kNum, T>
                            : sink_bwd_kernel<1, T>;
    kernel<<<narrow<int>(a.o_THd.dim(1)), kBwdThreads, 0, cuda_stream(s)>>>(
        a.dsink_H.ptr<float>(), a.do_THd.ptr<T>(), a.o_THd.ptr<T>(), a.lse_TH.ptr<float>(), a.sink_H.ptr<float>(),
        a.o_THd.dim(0), a.o_THd.dim(1), width);
  });
  check_launch("attention_sink_bwd");
}

}  // namespace moebius::cuda
