// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/one_token/one_token_backends.h"

namespace moebius::cuda {

bool takes(const Stream&, const NormGemm&) { return false; }
bool takes(const Stream&, const NormRouterLogits&) { return false; }
bool takes(const Stream&, const RotatedAttention&) { return false; }
bool takes(const Stream&, const TokenExperts&) { return false; }
void norm_gemm(Stream&, const NormGemm&) { missing_cuda("norm_gemm"); }
void norm_router_logits(Stream&, const NormRouterLogits&) { missing_cuda("norm_router_logits"); }
void rotated_attention(Stream&, const RotatedAttention&) { missing_cuda("rotated_attention"); }
void token_experts(Stream&, const TokenExperts&) { missing_cuda("token_experts"); }

}  // namespace moebius::cuda
