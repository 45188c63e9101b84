// Merges the attention of the same queries over different keys, by their log-sum-exps (Liu et al., Ring Attention,
// arXiv 2310.01889): the running softmax of Dao et al. (arXiv 2205.14135), over parts.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// lse' = log(e^lse + e^part_lse)
// o' = e^(lse - lse') o + e^(part_lse - lse') part
//
// If neither has a key, lse' = -inf and o' = 0. The first merge starts with o = 0 and lse = -inf.
struct AttentionMerge {
  Tensor o_THd, lse_TH;          // inout, f32
  Tensor part_THd, part_lse_TH;  // in; part f32 or bf16, its lse f32
};
void attention_merge(Stream& s, const AttentionMerge& a);
Cost cost(const AttentionMerge& a);

}  // namespace moebius
