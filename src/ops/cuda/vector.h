// What kernels over rows and flat ranges share: elements of f32 or bf16 as floats, several at once, and sums over warps
// and blocks in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "core/error.h"

namespace moebius::cuda {

// Elements of T in the 16 bytes that a thread moves at once.
template <class T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float element(float x) { return x; }
__device__ __forceinline__ float element(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ void set(float& to, float x) { to = x; }
__device__ __forceinline__ void set(bf16& to, float x) { to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

// x as a T holds it.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  T t;
  set(t, x);
  return element(t);
}

// kNum elements, as the widest words that they fill. REQUIRES: p at a multiple of those words.
template <class T, int kNum>
struct alignas(sizeof(T) * kNum < 16 ? sizeof(T) * kNum : 16) Elements {
  T x[kNum];
};

template <int kNum, class T>
__device__ __forceinline__ void load(float (&to)[kNum], const T* p) {
  const Elements<T, kNum> e = *reinterpret_cast<const Elements<T, kNum>*>(p);
#pragma unroll
  for (int i = 0; i < kNum; ++i) to[i] = element(e.x[i]);
}

template <int kNum, class T>
__device__ __forceinline__ void store(T* p, const float (&from)[kNum]) {
  Elements<T, kNum> e;
#pragma unroll
  for (int i = 0; i < kNum; ++i) set(e.x[i], from[i]);
  *reinterpret_cast<Elements<T, kNum>*>(p) = e;
}

// 1 / (1 + e^-x), in [0, 1] for every x that is a number.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// Over the lanes of aligned groups of `num_lanes` (a power of two), in every lane. All lanes of the warp call it.
__device__ __forceinline__ float group_sum(float x, int num_lanes) {
  for (int distance = num_lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Over the block, whole warps, in every thread. shared: 32 numbers; a later call needs others, or a barrier between.
template <class T>
__device__ __forceinline__ T block_sum(T x, T* shared) {
  x = warp_sum(x);
  if (blockDim.x == 32) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_sum(lane < blockDim.x / 32 ? shared[lane] : T{0});
}
__device__ __forceinline__ float block_max(float x, float* shared) {
  x = warp_max(x);
  if (blockDim.x == 32) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return warp_max(lane < blockDim.x / 32 ? shared[lane] : shared[0]);
}

// An index from memory that is outside its table: the launch fails, and with it the next call that looks.
__device__ __forceinline__ void require(bool holds) {
  if (!holds) __trap();
}

// fn(T{}) for the element type T of a dtype that ops compute in.
template <class F>
void with_float_type(DType dtype, F&& fn) {
  if (dtype == DType::bf16) return fn(bf16{});
  MOEBIUS_ASSERT(dtype == DType::f32);
  fn(float{});
}

// Whether all rows of these arrays, `width` elements of `element_bytes` each, start at multiples of 16 bytes.
template <class... P>
bool rows_are_aligned(int64_t width, int64_t element_bytes, const P*... p) {
  return width * element_bytes % 16 == 0 && ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

// Whether n elements that start at these addresses are whole vectors of num of them.
template <class... P>
bool is_whole(int64_t n, int num, const P*... p) {
  return n % num == 0 && ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

inline int num_blocks(int64_t n, int64_t per_block) { return narrow<int>(div_ceil(n, per_block)); }

// The least power of two that is at least n and at least `least`, itself a power of two.
inline int power_of_two(int64_t n, int least) {
  int p = least;
  while (p < n) p *= 2;
  return p;
}

}  // namespace moebius::cuda
