// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cuda {

void embedding_fwd(Stream&, const EmbeddingFwd&) { missing_cuda("embedding_fwd"); }
void embedding_bwd(Stream&, const EmbeddingBwd&) { missing_cuda("embedding_bwd"); }
void lm_loss(Stream&, const LmLoss&) { missing_cuda("lm_loss"); }
void lm_logits_block(Stream&, const LmLogitsBlock&) { missing_cuda("lm_logits_block"); }
void lm_loss_block(Stream&, const LmLossBlock&) { missing_cuda("lm_loss_block"); }

}  // namespace moebius::cuda
