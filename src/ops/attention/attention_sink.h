// Attention sinks: one more logit in the softmax of each head, without a value, so that a query may attend to nothing
// (gpt-oss, arXiv 2508.10925; Xiao et al., arXiv 2309.17453). A sink needs only the log-sum-exp of attention without
// it, so it is applied after any attention kernel, and after parts are merged.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// lse' = log(e^lse + e^sink[h])
// o' = e^(lse - lse') o
//
// Apply it once, to the attention over all keys. attention_bwd reads the results o' and lse' unchanged: with p over
// keys and sink, <p, dp> is <do, o'>, since the sink's value is 0.
struct AttentionSinkFwd {
  Tensor o_THd, lse_TH;  // inout; o f32 or bf16, lse f32
  Tensor sink_H;         // in f32
};
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
Cost cost(const AttentionSinkFwd& a);

// p = e^(sink[h] - lse[t,h])
// dsink[h] += - sum over t of p <do[t,h,:], o[t,h,:]>
//
// o and lse are the results of attention_sink_fwd. Sums are in f32, in a fixed order.
struct AttentionSinkBwd {
  Tensor dsink_H;                        // inout f32
  Tensor do_THd, o_THd, lse_TH, sink_H;  // in
};
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
Cost cost(const AttentionSinkBwd& a);

}  // namespace moebius
