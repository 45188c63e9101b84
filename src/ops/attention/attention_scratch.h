// The scratch of attention's CUDA kernels. It depends on the arguments of a call alone, so that a plan counts it without
// a GPU. Host code only, part of every build: each build plans the same.
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

// Returns whether Hopper's own kernels take the call.
bool sm90_takes(const AttentionFwd& a);
bool sm90_takes(const AttentionBwd& a);
// The scratch that Hopper's backward pass works with best: sm90_sums_bytes and sm90_path_bytes. With less, down to 8
// bytes a row and head, it computes scores once more. With heads of 128 its sums then have another order.
int64_t sm90_scratch_bytes(const AttentionBwd& a);
// Bytes for the sums of each row and head, in whole 256 bytes.
int64_t sm90_sums_bytes(const AttentionBwd& a);
// Bytes for a path beside the sums of rows.
int64_t sm90_path_bytes(const DsSizes& z, AttentionBwdPath path);
DsSizes ds_sizes(const AttentionBwd& a);
// Returns the path that the call asks for, or the one chosen for its sizes. Throws Error{usage} if the one it asks for
// has no bounded scratch.
AttentionBwdPath sm90_path(const AttentionBwd& a);

// The keys of a block of cached attention; positions alone decide which.
inline constexpr int64_t kCachedPieceKeys = 64;
inline int64_t num_cached_pieces(const CachedAttentionFwd& a) { return div_ceil(a.max_tokens, kCachedPieceKeys); }

}  // namespace moebius::cuda
