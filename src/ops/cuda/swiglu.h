// SwiGLU's formulas for all kernels, whether a separate pass or an epilogue, so that both give the same bits: the
// compiler cannot fuse any product here with a sum.
#pragma once

#include <type_traits>

#include "ops/cuda/vector.h"

namespace moebius::cuda {

// Replaces several x by 1 / (1 + e^-x), to about 2^-21 for |x| < 8: for values that are rounded to bf16 afterwards.
// Each step is computed for all values before the next one, so that the special-function unit processes
// several at once.
template <int kNum>
__device__ __forceinline__ void approximate_sigmoids(float (&x)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum; ++i)
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(x[i]) : "f"(__fmul_rn(x[i], -1.44269504f)));
#pragma unroll
  for (int i = 0; i < kNum; ++i) asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(x[i]) : "f"(__fadd_rn(x[i], 1.0f)));
}

// Computes z = 1 / (1 + e^-x) with the accuracy that elements of T need.
template <class T, int kNum>
__device__ __forceinline__ void sigmoids_of(float (&z)[kNum], const float (&x)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum; ++i) z[i] = std::is_same_v<T, float> ? sigmoid(x[i]) : x[i];
  if constexpr (!std::is_same_v<T, float>) approximate_sigmoids(z);
}

// Returns silu(gate) * up, given z = sigmoid(gate).
__device__ __forceinline__ float swiglu(float gate, float z, float up) { return __fmul_rn(__fmul_rn(gate, z), up); }

// Its derivatives times da: with silu = gate z, da/dgate = up (z + silu (1 - z)) and da/dup = silu.
struct SwigluGradient {
  float dgate, dup;
};
__device__ __forceinline__ SwigluGradient swiglu_gradient(float da, float gate, float z, float up) {
  const float silu = __fmul_rn(gate, z);
  return {__fmul_rn(__fmul_rn(da, up), __fadd_rn(z, fmaf(-silu, z, silu))), __fmul_rn(da, silu)};
}

}  // namespace moebius::cuda
