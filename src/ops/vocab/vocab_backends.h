// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct EmbeddingFwd;
struct EmbeddingBwd;
struct LmLoss;
struct LmLogitsBlock;
struct LmLossBlock;

namespace cpu {
void embedding_fwd(Stream& s, const EmbeddingFwd& a);
void embedding_bwd(Stream& s, const EmbeddingBwd& a);
void lm_loss(Stream& s, const LmLoss& a);
void lm_logits_block(Stream& s, const LmLogitsBlock& a);
void lm_loss_block(Stream& s, const LmLossBlock& a);
}  // namespace cpu

namespace cuda {
void embedding_fwd(Stream& s, const EmbeddingFwd& a);
void embedding_bwd(Stream& s, const EmbeddingBwd& a);
void lm_loss(Stream& s, const LmLoss& a);
void lm_logits_block(Stream& s, const LmLogitsBlock& a);
void lm_loss_block(Stream& s, const LmLossBlock& a);
}  // namespace cuda

}  // namespace moebius
