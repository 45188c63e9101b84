// A sink of attention is one more logit in the softmax of each head. It has no value, so a
// query may attend to nothing (gpt-oss, arXiv 2508.10925; Xiao et al., arXiv 2309.17453). It
// needs only the log-sums of attention without it. So it is applied after any kernel, and after
// parts are merged.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// lse' = log(e^lse + e^sink[h])
// o' = e^(lse - lse') o
//
// It is applied once, to the whole of a query's keys. attention_bwd takes the result as it is: with
// p over keys and sink, <p, dp> is <do, o'>, since the sink's value is 0.
struct AttentionSinkFwd {
  Tensor o_THd, lse_TH;  // inout; o f32 or bf16, lse f32
  Tensor sink_H;         // in f32
};
void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a);
Cost cost(const AttentionSinkFwd& a);

// p = e^(sink[h] - lse[t,h])
// dsink[h] += - sum over t of p <do[t,h,:], o[t,h,:]>
//
// o and lse are those that forward left. Sums are in f32, in a fixed order.
struct AttentionSinkBwd {
  Tensor dsink_H;                        // inout f32
  Tensor do_THd, o_THd, lse_TH, sink_H;  // in
};
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a);
Cost cost(const AttentionSinkBwd& a);

}  // namespace moebius
