// The scratch of attention's CUDA kernels. It depends only on the arguments of a call, so a plan counts it without a GPU.
// This is host code and part of every build.
#pragma once

#include <cstdint>

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_sizes.h"
#include "ops/attention/attention_slices.h"
#include "ops/attention/cached_attention.h"

namespace moebius::cuda {

// Bytes for the f32 kernels of any GPU.
int64_t generic_scratch_bytes(const AttentionBwd& a);
// Bytes for the bf16 kernels of compute capability 8.0.
int64_t sm80_scratch_bytes(const AttentionBwd& a);

// Returns whether the Hopper kernels support the call.
bool sm90_takes(const AttentionFwd& a);
bool sm90_takes(const AttentionBwd& a);
// Returns the bytes of scratch with which Hopper's backward pass is fastest: sm90_sums_bytes() + sm90_path_bytes(). With
// less, down to 8 bytes for each row and head, it recomputes scores. With heads of 128 its sums then have another order.
int64_t sm90_scratch_bytes(const AttentionBwd& a);
// Returns the bytes for the sums of each row and head, a multiple of 256.
int64_t sm90_sums_bytes(const AttentionBwd& a);
// Returns the bytes that a path needs in addition to the sums of rows.
int64_t sm90_path_bytes(const DsSizes& z, AttentionBwdPath path);
DsSizes ds_sizes(const AttentionBwd& a);
// Returns the path that the call requests, or the one chosen for its sizes. Throws Error{usage} if the requested path
// has no bounded scratch.
AttentionBwdPath sm90_path(const AttentionBwd& a);

// The number of keys of a piece of cached attention. Only positions decide which keys a piece has.
inline constexpr int64_t kCachedPieceKeys = 64;
inline int64_t num_cached_pieces(const CachedAttentionFwd& a) { return div_ceil(a.max_tokens, kCachedPieceKeys); }

}  // namespace moebius::cuda
