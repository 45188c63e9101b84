// The four implementations of attention on CUDA. The arguments of a call, the GPU and run.kernels decide which one runs
// it, never a measurement.
//
// generic: f32 of any width up to 256, any mask of the header.
//
// sm80: bf16 of any width up to 256, any mask of the header: mma.sync.
//
// sm90: bf16 of width 64, 128, and 192 with values of 128, any mask of the header: wgmma and the
// tensor copy engine.
//
// cuDNN: causal attention without documents, whole or in parts, where attention_choice.h says that it is faster.
//
// All are deterministic, and agree within rounding.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"
#include "ops/attention/attention_cudnn.h"

namespace moebius::cuda {

// The sizes of a call. Rows are those of one sequence. Query i has the position of key shift + i, which a
// part may lack.
struct AttentionSizes {
  int64_t rows, kv_rows, shift;
  int64_t kv_first;  // the position of key 0
  int heads, kv_heads, width, v_width;
  int64_t window;
  float scale;
  const int32_t* doc_start;  // positions, or null
};
AttentionSizes attention_sizes(const AttentionFwd& a);
AttentionSizes attention_sizes(const AttentionBwd& a);

void generic_attention_fwd(Stream& s, const AttentionFwd& a);
void generic_attention_bwd(Stream& s, const AttentionBwd& a);
int64_t generic_scratch_bytes(const AttentionBwd& a);

void sm80_attention_fwd(Stream& s, const AttentionFwd& a);
void sm80_attention_bwd(Stream& s, const AttentionBwd& a);
int64_t sm80_scratch_bytes(const AttentionBwd& a);

bool sm90_takes(const AttentionFwd& a);
bool sm90_takes(const AttentionBwd& a);
void sm90_attention_fwd(Stream& s, const AttentionFwd& a);
void sm90_attention_bwd(Stream& s, const AttentionBwd& a);
// The scratch that the backward pass works with best. With less, down to 8 bytes a row and head, it
// computes scores once more. With heads of 128 its sums then have another order.
int64_t sm90_scratch_bytes(const AttentionBwd& a);

// Raises max_logit_H. REQUIRES: it is not empty.
void raise_max_logit(Stream& s, const AttentionFwd& a);

// to [batch, heads, rows] = from [batch, rows, heads]
struct HeadsFirst {
  float* to;          // out
  const float* from;  // in
  int64_t batch, rows, heads;
};
void heads_first(Stream& s, const HeadsFirst& a);

// Returns false and does nothing if cuDNN needs more scratch than the call has. Then our own kernels run.
bool cudnn_attention_fwd(Stream& s, const AttentionFwd& a);
bool cudnn_attention_bwd(Stream& s, const AttentionBwd& a);
// Returns the scratch for cuDNN, which is known without a GPU: a bound for the version that was measured.
int64_t cudnn_scratch_bytes(const AttentionFwd& a);
int64_t cudnn_scratch_bytes(const AttentionBwd& a);

}  // namespace moebius::cuda
