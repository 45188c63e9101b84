#include "ops/attention/attention_merge.h"

#include "device/cuda/cuda.h"
#include "ops/attention/attention_backends.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Merge {
  float *o, *lse;
  const T* part;
  const float* part_lse;
  int64_t rows;
  int width;
};

// A warp is a row of a head; all its lanes read both sums before the first one writes.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) merge_kernel(Merge<T> a) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= a.rows) return;
  const float lse = a.lse[row], part_lse = a.part_lse[row];
  if (part_lse == -INFINITY) return;  // it saw no key
  const float max = fmaxf(lse, part_lse), merged = max + logf(expf(lse - max) + expf(part_lse - max));
  const float mine = expf(lse - merged), its = expf(part_lse - merged);
  __syncwarp();
  if (lane == 0) a.lse[row] = merged;
  for (int j = lane * kNum; j < a.width; j += 32 * kNum) {
    float o[kNum], part[kNum];
    load(o, a.o + row * a.width + j);
    load(part, a.part + row * a.width + j);
#pragma unroll
    for (int i = 0; i < kNum; ++i) o[i] = mine * o[i] + its * part[i];
    store(a.o + row * a.width + j, o);
  }
}

}  // namespace

void attention_merge(Stream& s, const AttentionMerge& a) {
  with_float_type(a.part_THd.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Merge<T> x{.o = a.o_THd.ptr<float>(),
                     .lse = a.lse_TH.ptr<float>(),
                     .part = a.part_THd.ptr<T>(),
                     .part_lse = a.part_lse_TH.ptr<float>(),
                     .rows = a.lse_TH.numel(),
                     .width = narrow<int>(a.o_THd.dim(2))};
    const int blocks = num_blocks(x.rows * 32, kThreads);
    if (rows_are_aligned(x.width, sizeof(T), x.o, x.part))
      merge_kernel<4><<<blocks, kThreads, 0, cuda_stream(s)>>>(x);
    else
      merge_kernel<1><<<blocks, kThreads, 0, cuda_stream(s)>>>(x);
  });
  check_launch("attention_merge");
}

}  // namespace moebius::cuda
