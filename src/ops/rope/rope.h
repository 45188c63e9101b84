// RoPE (rotary position embedding, Su et al., arXiv 2104.09864), which also splits the output of the projection into
// queries, keys and values, and applies RMSNorm to q and k if its weights are given: to each head, or to all heads
// together (OLMoE, arXiv 2409.02060). Element i pairs with i + d/2, as in Llama.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// cos_sin[p] = magnitude cos(p frequency[i]) for i < d/2, then the sines
//
// The table is f32 [max_positions, d], computed in double. The default frequencies are
// theta^(-2i/d). A table with frequencies is computed on the host, even for a GPU, once per run.
struct RopeTable {
  Tensor cos_sin_Pd;  // out
  double theta = 10000.0;
  std::vector<double> frequencies;  // d/2 of them, or none
  double magnitude = 1.0;           // 1 without frequencies
};
void rope_table(Stream& s, const RopeTable& a);

// Row t of qkv is [H heads of q | G heads of k | G heads of v], each d wide. q and k are normalised
// with their weights (if given) and rotated by pos[t]; v is copied. Weights of d elements are those of each head.
// Weights of H d and G d elements, A and B, are those of all heads of q, or of k, which are normalised together.
//
// All have the dtype of qkv, f32 or bf16; the maths is in f32. What is normalised is rounded
// before the product with w, as in rms_norm_fwd; the rotation is rounded once.
struct RopeFwd {
  Tensor q_THd, k_TGd, v_TGd;        // out
  Tensor qkv_TC, pos_T, cos_sin_Pd;  // in; pos i32
  Tensor q_norm_A, k_norm_B;         // in, empty: no normalisation
  float eps = 1e-6f;
};
void rope_fwd(Stream& s, const RopeFwd& a);
Cost cost(const RopeFwd& a);

// Computes dqkv from dq, dk and dv. dq_norm and dk_norm are f32 [A] and [B], and accumulate. Rows are summed in fixed
// chunks. partial is f32 scratch of shape [num_partials(a, s), A + B], and is needed only with norms.
struct RopeBwd {
  Tensor dqkv_TC;                 // out
  Tensor dq_norm_A, dk_norm_B;    // inout
  Tensor partial_PW;              // scratch
  Tensor dq_THd, dk_TGd, dv_TGd;  // in
  Tensor qkv_TC, pos_T, cos_sin_Pd, q_norm_A, k_norm_B;
  float eps = 1e-6f;
  static int64_t num_partials(const RopeBwd& a, const Stream& s);
};
void rope_bwd(Stream& s, const RopeBwd& a);
Cost cost(const RopeBwd& a);

// Returns whether all heads of q, and all of k, are normalised together.
bool has_norms_of_all_heads(const RopeFwd& a);
bool has_norms_of_all_heads(const RopeBwd& a);

}  // namespace moebius
