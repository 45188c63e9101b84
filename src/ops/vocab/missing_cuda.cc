// The CUDA backend of these ops in a build without it.
#include "ops/backends.h"

namespace moebius::cuda {

void embedding_fwd(Stream&, const EmbeddingFwd&) { missing_cuda("embedding_fwd"); }
void embedding_bwd(Stream&, const EmbeddingBwd&) { missing_cuda("embedding_bwd"); }
void lm_loss(Stream&, const LmLoss&) { missing_cuda("lm_loss"); }

}  // namespace moebius::cuda
