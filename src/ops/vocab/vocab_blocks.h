// The language-model loss of vocab.h where ranks share the vocabulary. Each rank has a block of the
// head's rows. Per token and block it needs no more than three numbers of the other ranks
// (Megatron-LM, arXiv 1909.08053, section 3).
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// logits = x w^T  of a block, the tokens [first, first + V) of the vocabulary
// stats[t] = [max of the logits, sum of e^(logit - max), the target's logit]
//
// The target's logit is 0 where the target is in another block.
struct LmLogitsBlock {
  Tensor logits_CV, stats_C3;   // out, f32
  Tensor x_CD, w_VD, target_C;  // in; x, w: one dtype, f32 or bf16; target i32
  int64_t first = 0;
};
void lm_logits_block(Stream& s, const LmLogitsBlock& a);
Cost cost(const LmLogitsBlock& a);

// Takes the logits of a block and the stats of all n blocks. The loss is that of LmLoss, the same
// on every rank. With gradients (dx given) it also computes the block's share of dx, to be summed
// over the blocks, and adds to dw of its rows.
struct LmLossBlock {
  Tensor loss_C;                          // out, f32
  Tensor dx_CD, dw_VD;                    // out, inout; both empty: no gradients; dw alone empty: of x alone
  Tensor dlogits_CV;                      // scratch, x's dtype; empty without gradients
  Tensor logits_CV;                       // in, becomes scratch
  Tensor stats_nC3;                       // in
  Tensor x_CD, w_VD, target_C, weight_C;  // in
  Tensor scale_1;                         // in f32, may be empty: takes the place of scale
  float scale = 1.0f;
  int64_t first = 0;
};
void lm_loss_block(Stream& s, const LmLossBlock& a);
Cost cost(const LmLossBlock& a);

}  // namespace moebius
