// The gated activations of experts.h as the epilogues of the sm_90 kernels take them, one element at a
// time. With z = sigmoid(f.logit(gate)), which epilogues compute for several elements at once:
//   f.value(gate, z, up)           the activation
//   f.gradient(da, gate, z, up)    its derivatives times da
#pragma once

#include "ops/cuda/swiglu.h"
#include "ops/experts/experts.h"
#include "ops/sm90/copy.h"

namespace moebius::cuda {

// silu(gate) up, with the formulas of every other kernel (ops/cuda/swiglu.h).
struct SwigluFormula {
  SwigluFormula() = default;
  explicit SwigluFormula(const GatedActivation&) {}
  __device__ __forceinline__ float logit(float gate) const { return gate; }
  __device__ __forceinline__ float value(float gate, float z, float up) const { return swiglu(gate, z, up); }
  __device__ __forceinline__ SwigluGradient gradient(float da, float gate, float z, float up) const {
    return swiglu_gradient(da, gate, z, up);
  }
};

// These are min and max that keep a NaN, so that the check for values that are not finite finds it.
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float greatest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(x), "f"(y));
  return greatest;
}

// Every GatedActivation.
struct ClampedFormula {
  ClampedFormula() = default;
  explicit ClampedFormula(const GatedActivation& f) : f(f) {}
  GatedActivation f;

  __device__ __forceinline__ float logit(float gate) const { return __fmul_rn(f.alpha, clamped_gate(gate)); }
  __device__ __forceinline__ float value(float gate, float z, float up) const {
    return __fmul_rn(__fmul_rn(clamped_gate(gate), z), shifted_up(up));
  }
  // Values that the limits cut off have no gradient.
  __device__ __forceinline__ SwigluGradient gradient(float da, float gate, float z, float up) const {
    const float g = clamped_gate(gate), slope = fmaf(__fmul_rn(f.alpha, g), __fadd_rn(1.0f, -z), 1.0f);
    const float dgate = __fmul_rn(__fmul_rn(__fmul_rn(da, shifted_up(up)), z), slope);
    const float dup = __fmul_rn(__fmul_rn(da, g), z);
    return {gate > f.limit ? 0.0f : dgate, fabsf(up) > f.limit ? 0.0f : dup};
  }

 private:
  __device__ __forceinline__ float clamped_gate(float gate) const { return min_or_nan(gate, f.limit); }
  __device__ __forceinline__ float shifted_up(float up) const {
    return __fadd_rn(max_or_nan(min_or_nan(up, f.limit), -f.limit), f.shift);
  }
};

// The backward pass of two columns of a row, which are a word of each operand, in place: gate and up become their
// gradients, and g becomes sa. z0, z1: the sigmoids of the two; product: <g, a> of the row so far.
template <class Formula>
__device__ __forceinline__ void gated_backward(const Formula& f, uint32_t& gate, uint32_t& up, uint32_t& g, float z0,
                                               float z1, float weight, float& product) {
  const float g0 = low_bf16(g), g1 = high_bf16(g);
  const float gate0 = low_bf16(gate), gate1 = high_bf16(gate), up0 = low_bf16(up), up1 = high_bf16(up);
  const SwigluGradient d0 = f.gradient(__fmul_rn(weight, g0), gate0, z0, up0);
  const SwigluGradient d1 = f.gradient(__fmul_rn(weight, g1), gate1, z1, up1);
  const uint32_t a = pack_bf16(f.value(gate0, z0, up0), f.value(gate1, z1, up1));  // as expert_up rounded it
  gate = pack_bf16(d0.dgate, d1.dgate);
  up = pack_bf16(d0.dup, d1.dup);
  product = fmaf(g1, high_bf16(a), fmaf(g0, low_bf16(a), product));
  g = pack_bf16(__fmul_rn(weight, low_bf16(a)), __fmul_rn(weight, high_bf16(a)));
}

}  // namespace moebius::cuda
