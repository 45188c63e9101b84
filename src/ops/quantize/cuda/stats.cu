#include "ops/quantize/cuda/stats.h"

#include "device/cuda/cuda.h"
#include "ops/quantize/cuda/tile.h"

namespace moebius::cuda::quantize_tile {
namespace {

struct Stats {
  uint32_t elements, saturated, zeroed;
  float smallest, largest;  // scales; infinity and 0: none

  __device__ void add(const Stats& other) {
    elements += other.elements;
    saturated += other.saturated;
    zeroed += other.zeroed;
    smallest = fminf(smallest, other.smallest);
    largest = fmaxf(largest, other.largest);
  }
};

__device__ Stats of_lanes(Stats f) {
  for (int step = 1; step < 32; step *= 2) {
    f.add({.elements = __shfl_xor_sync(~0u, f.elements, step),
           .saturated = __shfl_xor_sync(~0u, f.saturated, step),
           .zeroed = __shfl_xor_sync(~0u, f.zeroed, step),
           .smallest = __shfl_xor_sync(~0u, f.smallest, step),
           .largest = __shfl_xor_sync(~0u, f.largest, step)});
  }
  return f;
}

// *to = the smaller of *to and a positive number; a *to of 0 has no number yet.
__device__ void store_smaller(double* to, double number) {
  auto* bits = reinterpret_cast<unsigned long long*>(to);
  unsigned long long old = *bits;
  while (old == 0 || __longlong_as_double(static_cast<long long>(old)) > number) {
    const unsigned long long seen = atomicCAS(bits, old, static_cast<unsigned long long>(__double_as_longlong(number)));
    if (seen == old) return;
    old = seen;
  }
}

// The bits of positive numbers are ordered as the numbers are.
__device__ void store_larger(double* to, double number) {
  atomicMax(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(__double_as_longlong(number)));
}

// most: the largest element of the format.
template <class T>
__global__ void __launch_bounds__(kThreads) stats_kernel(Problem p, double* stats_5, float most) {
  extern __shared__ float tile[];
  __shared__ Stats of_warp[kWarps];
  const Place t = place_of(p);
  if (t.rows == 0) return;
  load_tile<T>(tile, p, t);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * kRowsOfWarp;
  Stats f{.smallest = INFINITY};
  for (int i = first; i < min(first + kRowsOfWarp, t.rows); ++i) {
    float v[kOfLane];
    row_of(v, tile, p, i, lane);
    for (int j = 0; j < kOfLane; ++j) {
      const int col = lane * kOfLane + j;
      const float magnitude = fabsf(v[j]);
      if (col >= t.cols || magnitude == 0) continue;
      const float scale = scale_of(p, t.matrix, t.row + i, t.col + col);
      ++f.elements;
      f.zeroed += value_of(p, (t.matrix * p.rows + t.row + i) * p.cols + t.col + col) == 0 ? 1 : 0;
      f.saturated += magnitude > most * scale ? 1 : 0;  // false for values that are not finite: their scale is a NaN
      if (scale > 0) f.add({.smallest = scale, .largest = scale});
    }
  }
  f = of_lanes(f);
  if (lane == 0) of_warp[warp] = f;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) f.add(of_warp[w]);
  if (f.elements == 0) return;
  atomicAdd(stats_5, static_cast<double>(f.elements));
  atomicAdd(stats_5 + 1, static_cast<double>(f.saturated));
  atomicAdd(stats_5 + 2, static_cast<double>(f.zeroed));
  if (f.largest == 0) return;
  store_smaller(stats_5 + 3, f.smallest);
  store_larger(stats_5 + 4, f.largest);
}

}  // namespace

void add_stats(Stream& s, const Quantize& a) {
  const Problem p = problem_of(a);
  const int64_t matrices = a.q.data.shape.rank() == 3 ? a.q.data.dim(0) : 1;
  with_float_type(a.x_RC.dtype, [&](auto zero) {
    launch(s, p, matrices, stats_kernel<decltype(zero)>, a.stats_5.ptr<double>(), largest_element(a.q.data.dtype));
  });
  check_launch("quantize: sums of log.precision");
}

}  // namespace moebius::cuda::quantize_tile
