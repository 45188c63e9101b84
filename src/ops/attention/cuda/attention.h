// The four implementations of attention on CUDA. The arguments of a call, the GPU and run.kernels decide which one runs
// it, never a measurement.
//
// generic: f32 of any width up to 256, any mask of the header.
//
// sm80: bf16 of any width up to 256, any mask of the header: mma.sync.
//
// sm90: bf16 of width 64, 128, and 192 with values of 128, any mask of the header, and the backward passes of width 96
// and 256 that sm90_takes() accepts: wgmma and the tensor copy engine.
//
// cuDNN: causal attention without documents, whole or in parts, where attention_choice.h says that it is faster.
//
// All are deterministic, and agree within rounding. attention_scratch.h has their scratch.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_sizes.h"

namespace moebius::cuda {

void generic_attention_fwd(Stream& s, const AttentionFwd& a);
void generic_attention_bwd(Stream& s, const AttentionBwd& a);

void sm80_attention_fwd(Stream& s, const AttentionFwd& a);
void sm80_attention_bwd(Stream& s, const AttentionBwd& a);

void sm90_attention_fwd(Stream& s, const AttentionFwd& a);
void sm90_attention_bwd(Stream& s, const AttentionBwd& a);

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

}  // namespace moebius::cuda
