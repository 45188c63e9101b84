// Small operations on whole tensors. f32 or bf16 unless said; maths in f32.
#pragma once

#include "core/rng.h"
#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

void fill_zero(Stream& s, Tensor x);
void copy(Stream& s, Tensor to, Tensor from);  // same shape; converts f32 <-> bf16
void add(Stream& s, Tensor y, Tensor x);       // y += x, same shape and dtype

// out[0] += scale * sum of x, in double, fixed order. out f64 [1]; x f32.
struct SumInto {
  Tensor out_1;  // inout
  Tensor x;      // in
  double scale = 1.0;
};
void sum_into(Stream& s, const SumInto& a);

// y[t,:] += sigmoid(gate[t]) * x[t,:]: the gated shared expert of Qwen2-MoE. gate f32.
struct GatedAddFwd {
  Tensor y_TD;          // inout
  Tensor x_TD, gate_T;  // in
};
void gated_add_fwd(Stream& s, const GatedAddFwd& a);
// dx = sigmoid(gate) dy;  dgate[t] = sigmoid'(gate) <dy[t,:], x[t,:]>
struct GatedAddBwd {
  Tensor dx_TD, dgate_T;       // out
  Tensor dy_TD, x_TD, gate_T;  // in
};
void gated_add_bwd(Stream& s, const GatedAddBwd& a);

// y[t, d] = x[t, d] * U(1 - eps, 1 + eps)
// The draw is that of Rng(seed, jitter, step, layer) for element d of token first_token + row + t. Step and token
// are in memory, so that a recorded step draws anew.
struct Jitter {
  Tensor y_TD;    // out
  Tensor x_TD;    // in
  Tensor draw_2;  // in i64 [step, first token]
  int64_t row = 0;
  uint64_t seed = 0;
  uint32_t layer = 0;
  float eps = 0.0f;
};
void jitter(Stream& s, const Jitter& a);

// x[i] = mean + std * normal of element first_index + i.
struct FillNormal {
  Tensor x;
  Rng rng;
  uint64_t first_index = 0;
  float mean = 0.0f, std = 1.0f;
};
void fill_normal(Stream& s, const FillNormal& a);

// Index of the first element that is NaN or Inf, or -1. Host value: for diagnosis only, never inside a step.
int64_t find_nonfinite(Stream& s, Tensor x);

}  // namespace moebius
