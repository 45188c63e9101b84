// Attention of a build without cuDNN: the generic kernels take every call.
#include "ops/attention/attention_cuda.h"

namespace moebius::cuda {

bool cudnn_takes(const AttentionFwd&) { return false; }
bool cudnn_takes(const AttentionBwd&) { return false; }
bool cudnn_attention_fwd(Stream&, const AttentionFwd&) { return false; }
bool cudnn_attention_bwd(Stream&, const AttentionBwd&) { return false; }
int64_t cudnn_scratch_bytes(const AttentionFwd&) { return 0; }
int64_t cudnn_scratch_bytes(const AttentionBwd&) { return 0; }
std::string cudnn_version() { return ""; }

}  // namespace moebius::cuda
