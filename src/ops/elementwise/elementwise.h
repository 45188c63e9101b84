// Small operations on whole tensors. Tensors are f32 or bf16 unless a comment says otherwise; the
// maths is in f32.
#pragma once

#include "core/rng.h"
#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

void fill_zero(Stream& s, Tensor x);
void copy(Stream& s, Tensor to, Tensor from);  // same shape; converts f32 <-> bf16
void add(Stream& s, Tensor y, Tensor x);       // y += x, same shape; x is of y's dtype, or f32

// y[s,:] += row[0,:]
//
// Both have one dtype.
void add_row(Stream& s, Tensor y_SD, Tensor row_1D);

// sum[c] += sum over t of x[t,c]
//
// sum is f32. Blocks of kRowsOfBlock rows are summed in f32, and then the blocks in order, so that the bits do not
// depend on the size of the GPU or the number of threads.
struct SumRows {
  static constexpr int64_t kRowsOfBlock = 256;
  Tensor sum_C;    // inout
  Tensor x_TC;     // in
  Tensor scratch;  // scratch_bytes(a) bytes of any dtype
  static int64_t scratch_bytes(const SumRows& a);
};
void sum_rows(Stream& s, const SumRows& a);

// to[t, to_first + j] = from[t, from_first + j]  for j < count
//
// Both have one dtype, which may be any, and the same number of rows.
struct CopyColumns {
  Tensor to_TA;    // out
  Tensor from_TB;  // in
  int64_t to_first = 0, from_first = 0, count = 0;
};
void copy_columns(Stream& s, const CopyColumns& a);

// out[0] += scale * sum of x
//
// The sum is in f64, in a fixed order. out is f64 [1]; x is f32.
struct SumInto {
  Tensor out_1;  // inout
  Tensor x;      // in
  double scale = 1.0;
};
void sum_into(Stream& s, const SumInto& a);

// y[t,:] += sigmoid(gate[t]) * x[t,:]
//
// This is the gated shared expert of Qwen2-MoE. gate is f32.
struct GatedAddFwd {
  Tensor y_TD;          // inout
  Tensor x_TD, gate_T;  // in
};
void gated_add_fwd(Stream& s, const GatedAddFwd& a);
// dx[t,:] = sigmoid(gate[t]) * dy[t,:]
// dgate[t] = sigmoid'(gate[t]) <dy[t,:], x[t,:]>
struct GatedAddBwd {
  Tensor dx_TD, dgate_T;       // out
  Tensor dy_TD, x_TD, gate_T;  // in
};
void gated_add_bwd(Stream& s, const GatedAddBwd& a);

// y[t, d] = x[t, d] * U(1 - eps, 1 + eps)
// The draw is that of Rng(seed, jitter, step, layer) for element d of token first_token + row + t.
// Step and token are read from memory, so that each replay of a CUDA graph draws new numbers.
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

// x[i] = mean + std * normal,  where normal is the draw of element first_index + i
//
// With `uniform` the draw is uniform in (-sqrt(3), sqrt(3)), which also has variance 1.
struct FillNormal {
  Tensor x;
  Rng rng;
  uint64_t first_index = 0;
  float mean = 0.0f, std = 1.0f;
  bool uniform = false;
};
void fill_normal(Stream& s, const FillNormal& a);

// Returns the index of the first element that is NaN or infinite, or -1. It waits for the device, so it is for
// diagnosis and never part of a step.
int64_t find_nonfinite(Stream& s, Tensor x);

}  // namespace moebius
