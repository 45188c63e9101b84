// Replaces the CUDA backend of these ops in a build without it.
#include "ops/attention/attention_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void attention_fwd(Stream&, const AttentionFwd&) { missing_cuda("attention_fwd"); }
void attention_bwd(Stream&, const AttentionBwd&) { missing_cuda("attention_bwd"); }
void attention_merge(Stream&, const AttentionMerge&) { missing_cuda("attention_merge"); }
void attention_sink_fwd(Stream&, const AttentionSinkFwd&) { missing_cuda("attention_sink_fwd"); }
void attention_sink_bwd(Stream&, const AttentionSinkBwd&) { missing_cuda("attention_sink_bwd"); }
void cached_attention_fwd(Stream&, const CachedAttentionFwd&) { missing_cuda("cached_attention_fwd"); }

}  // namespace moebius::cuda
