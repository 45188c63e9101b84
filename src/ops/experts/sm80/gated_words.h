// The gated activation of experts.h and its derivatives, on words of two bf16. SwiGLU has the formulas, and so the
// bits, that it has in every other kernel (ops/cuda/swiglu.h).
#pragma once

#include "ops/cuda/swiglu.h"
#include "ops/experts/experts.h"
#include "ops/grouped_gemm/sm80/warp_rows.h"

namespace moebius::cuda::sm80 {

// The activation, and whether it is SwiGLU.
struct WordActivation {
  explicit WordActivation(const GatedActivation& f) : f(f), is_swiglu(f == GatedActivation{}) {}
  WordActivation() = default;
  GatedActivation f;
  bool is_swiglu = true;
};

// Four words as floats.
struct Elements {
  float x[8];
  __device__ __forceinline__ explicit Elements(const uint32_t (&word)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[2 * j] = low_of(word[j]);
      x[2 * j + 1] = high_of(word[j]);
    }
  }
};
__device__ __forceinline__ void pack(uint32_t (&word)[4], const float (&x)[8]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) word[j] = pack_pair(x[2 * j], x[2 * j + 1]);
}

// g and u of the activation of eight elements, and sigmoid(alpha g).
struct Gated {
  float g[8], u[8], z[8];
  __device__ __forceinline__ Gated(const GatedActivation& f, const float (&gate)[8], const float (&up)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] = gate[i] > f.limit ? f.limit : gate[i];
      u[i] = (up[i] > f.limit ? f.limit : up[i] < -f.limit ? -f.limit : up[i]) + f.shift;
      z[i] = f.alpha * g[i];
    }
    approximate_sigmoids(z);
  }
};

// Computes the activation a from gate and up.
__device__ __forceinline__ void activate(uint32_t (&a)[4], const WordActivation& activation, const uint32_t (&gate)[4],
                                         const uint32_t (&up)[4]) {
  const Elements from_gate(gate), from_up(up);
  float x[8];
  if (activation.is_swiglu) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = from_gate.x[i];
    approximate_sigmoids(x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = swiglu(from_gate.x[i], x[i], from_up.x[i]);
  } else {
    const Gated gated(activation.f, from_gate.x, from_up.x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = gated.g[i] * gated.z[i] * gated.u[i];
  }
  pack(a, x);
}

// The activation a, rounded, and the gradients that da gives.
struct ActivationGradients {
  float a[8], dgate[8], dup[8];

  __device__ __forceinline__ ActivationGradients(const WordActivation& activation, const float (&da)[8],
                                                 const uint32_t (&gate)[4], const uint32_t (&up)[4]) {
    const Elements from_gate(gate), from_up(up);
    activation.is_swiglu ? by_swiglu(da, from_gate.x, from_up.x) : by_clamped(activation.f, da, from_gate.x, from_up.x);
    uint32_t rounded[4];
    pack(rounded, a);
    const Elements as_rounded(rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = as_rounded.x[i];
  }

 private:
  __device__ __forceinline__ void by_swiglu(const float (&da)[8], const float (&gate)[8], const float (&up)[8]) {
    float z[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = gate[i];
    approximate_sigmoids(z);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluGradient gradient = swiglu_gradient(da[i], gate[i], z[i], up[i]);
      a[i] = swiglu(gate[i], z[i], up[i]);
      dgate[i] = gradient.dgate;
      dup[i] = gradient.dup;
    }
  }
  // A value that a limit replaces has no gradient.
  __device__ __forceinline__ void by_clamped(const GatedActivation& f, const float (&da)[8], const float (&gate)[8],
                                             const float (&up)[8]) {
    const Gated gated(f, gate, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float g = gated.g[i], u = gated.u[i], z = gated.z[i];
      a[i] = g * z * u;
      dgate[i] = gate[i] > f.limit ? 0.0f : da[i] * u * z * (1.0f + f.alpha * g * (1.0f - z));
      dup[i] = up[i] > f.limit || up[i] < -f.limit ? 0.0f : da[i] * g * z;
    }
  }
};

}  // namespace moebius::cuda::sm80
