// The parts that kernels over rows and flat ranges share: elements of f32 or bf16 as floats,
// several at once, and sums over warps and blocks in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

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

// Returns x rounded to T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  T t;
  set(t, x);
  return element(t);
}

// kNum elements in their format in memory, as the widest words that they fill.
template <class Word, int kNum>
struct Words {
  Word words[kNum];
};
template <class T, int kNum>
using Raw = std::conditional_t<sizeof(T) * kNum % 16 == 0, Words<uint4, sizeof(T) * kNum / 16>,
                               std::conditional_t<sizeof(T) * kNum == 8, Words<uint2, 1>, Words<T, kNum>>>;

// Loads 16 bytes, or returns zeros. It is volatile assembly: with C++, the compiler would move conditional loads to
// their uses, one after the other, and each would wait for the memory.
__device__ __forceinline__ uint4 fetch_word(const uint4* p, bool valid) {
  uint4 word;
  asm volatile(
      "{\n .reg .pred valid;\n"
      " setp.ne.u32 valid, %5, 0;\n"
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "=&r"(word.x), "=&r"(word.y), "=&r"(word.z), "=&r"(word.w)
      : "l"(p), "r"(static_cast<uint32_t>(valid))
      : "memory");
  return word;
}
template <class Word>
__device__ __forceinline__ Word fetch_word(const Word* p, bool valid) {
  return valid ? *p : Word{};
}

// Loads kNum elements from p, or returns zeros. Several fetches before the first unpack are in flight at once.
// REQUIRES: p at a multiple of the words.
template <int kNum, class T>
__device__ __forceinline__ Raw<T, kNum> fetch(const T* p, bool valid = true) {
  Raw<T, kNum> raw;
  constexpr int kWords = sizeof(raw.words) / sizeof(raw.words[0]);
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    raw.words[i] = fetch_word(reinterpret_cast<const Raw<T, kNum>*>(p)->words + i, valid);
  return raw;
}

template <class T, int kNum>
__device__ __forceinline__ void unpack(float (&to)[kNum], const Raw<T, kNum>& from) {
  if constexpr (sizeof(T) == 4 || kNum == 1) {
    const T* x = reinterpret_cast<const T*>(&from);
#pragma unroll
    for (int i = 0; i < kNum; ++i) to[i] = element(x[i]);
  } else {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&from);
#pragma unroll
    for (int i = 0; i < kNum; i += 2) {
      to[i] = __uint_as_float(pairs[i / 2] << 16);
      to[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000u);
    }
  }
}

template <class T, int kNum>
__device__ __forceinline__ Raw<T, kNum> pack(const float (&from)[kNum]) {
  Raw<T, kNum> raw;
  if constexpr (sizeof(T) == 4 || kNum == 1) {
    T* x = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < kNum; ++i) set(x[i], from[i]);
  } else {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(&raw);
#pragma unroll
    for (int i = 0; i < kNum; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
      pairs[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return raw;
}

template <int kNum, class T>
__device__ __forceinline__ void load(float (&to)[kNum], const T* p) {
  unpack<T>(to, fetch<kNum>(p));
}
template <int kNum, class T>
__device__ __forceinline__ void store(T* p, const float (&from)[kNum]) {
  *reinterpret_cast<Raw<T, kNum>*>(p) = pack<T>(from);
}

// Returns n / d. Below 2^32, which is nearly always the case, it takes a fifth of the instructions.
__device__ __forceinline__ int64_t quotient(int64_t n, uint32_t d) {
  return n >> 32 ? n / d : static_cast<int64_t>(static_cast<uint32_t>(n) / d);
}

// Returns 1 / (1 + e^-x), in [0, 1] for every x that is not NaN.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// Returns in every lane the sum over its aligned group of `num_lanes` lanes (a power of two). All lanes of the warp
// call it.
__device__ __forceinline__ float group_sum(float x, int num_lanes) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = distance < num_lanes ? x + other : x;
  }
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

// Returns in every thread the sum over the block, which consists of whole warps. shared: 32 elements; a later call
// needs others, or a barrier before it.
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

// Checks an index that was read from memory. If it is outside of its table, the launch fails, and the next CUDA call
// reports the error.
__device__ __forceinline__ void require(bool holds) {
  if (!holds) __trap();
}

// Calls fn(T{}) for the element type T of a dtype that ops compute in.
template <class F>
void with_float_type(DType dtype, F&& fn) {
  if (dtype == DType::bf16) return fn(bf16{});
  MOEBIUS_ASSERT(dtype == DType::f32);
  fn(float{});
}

// Returns whether all rows of these arrays start at multiples of 16 bytes. A row has `width`
// elements of `element_bytes` each.
template <class... P>
bool rows_are_aligned(int64_t width, int64_t element_bytes, const P*... p) {
  return width * element_bytes % 16 == 0 && ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

// Returns whether n elements that start at these addresses are whole vectors of num of them.
template <class... P>
bool is_whole(int64_t n, int num, const P*... p) {
  return n % num == 0 && ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

inline int num_blocks(int64_t n, int64_t per_block) { return narrow<int>(div_ceil(n, per_block)); }

// Returns n, rounded up to whole warps.
inline int whole_warps(int64_t n) { return narrow<int>(div_ceil(n, 32) * 32); }

}  // namespace moebius::cuda
