// A sink of attention: one more logit in the softmax of each head, which has no value, so that a query may attend to
// nothing (gpt-oss, arXiv 2508.10925; Xiao et al., arXiv 2309.17453). It needs no more than the log-sums of attention
// without it, so any kernel, and any merged parts, take one afterwards.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// lse' = log(e^lse + e^sink[h]),  o' = e^(lse - lse') o.  To be applied once to the whole of a query's keys. What is
// left serves attention_bwd as it is: with p over keys and sink, <p, dp> is <do, o'>, since the sink's value is 0.
struct AttentionSinkFwd {
  Tensor o_THd, lse_TH;  // inout; o f32 or bf16, lse f32
  Tensor sink_H;         // in f32
};
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
Cost cost(const AttentionSinkFwd& a);

// dsink[h] += - sum over t of p <do[t,h,:], o[t,h,:]>,  p = e^(sink[h] - lse[t,h])
// o and lse are as forward left them. Sums are in f32, in an order that is fixed.
struct AttentionSinkBwd {
  Tensor dsink_H;                        // inout f32
  Tensor do_THd, o_THd, lse_TH, sink_H;  // in
};
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
Cost cost(const AttentionSinkBwd& a);

namespace cpu {
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
}  // namespace cpu
namespace cuda {
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
}  // namespace cuda

}  // namespace moebius
