// The CUDA backend of ops/one_token/one_token.h. The arguments have been checked.
#pragma once

#include "device/device.h"

namespace moebius {

struct NormGemm;
struct NormRouterLogits;
struct RotatedAttention;
struct TokenExperts;

namespace cuda {
// Return whether the GPU of s has a kernel for this.
bool takes(const Stream& s, const NormGemm& a);
bool takes(const Stream& s, const NormRouterLogits& a);
bool takes(const Stream& s, const RotatedAttention& a);
bool takes(const Stream& s, const TokenExperts& a);
void norm_gemm(Stream& s, const NormGemm& a);
void norm_router_logits(Stream& s, const NormRouterLogits& a);
void rotated_attention(Stream& s, const RotatedAttention& a);
void token_experts(Stream& s, const TokenExperts& a);
}  // namespace cuda

}  // namespace moebius
