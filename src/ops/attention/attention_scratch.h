// The scratch of attention's CUDA kernels, and the choice of cuDNN. Both depend only on the arguments of a call and
// on the kernels that a GPU has, so a plan counts them without a GPU. This is host code and part of every build.
#pragma once

#include <cstdint>
#include <string>

#include "device/gpu_kernels.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_sizes.h"
#include "ops/attention/attention_slices.h"
#include "ops/attention/cached_attention.h"

namespace moebius {

// Returns whether cuDNN computes the call on such a GPU: never with portable kernels alone. Throws Error{usage} if
// a.kernels is cudnn, and cuDNN cannot compute the call.
bool uses_cudnn(const GpuKernels& on, const AttentionFwd& a);
bool uses_cudnn(const GpuKernels& on, const AttentionBwd& a);
// Returns whether the call may ask for cuDNN on such a GPU: its kernels may run, and cuDNN supports the call there.
bool may_use_cudnn(const GpuKernels& on, const AttentionFwd& a);
bool may_use_cudnn(const GpuKernels& on, const AttentionBwd& a);
// Returns whether plans for such a GPU use cuDNN's attention, and a message that says so.
inline bool plans_cudnn(const GpuKernels& on) { return has_cudnn() && !on.are_portable(); }
std::string planned_cudnn_text(const GpuKernels& on);

// Returns the bytes of scratch of a call: of the kernels that may run it on such a GPU, those with the most. On the
// null device, s counts for its target; on other devices this is scratch_bytes(a, s).
int64_t planned_scratch_bytes(const AttentionFwd& a, const Stream& s, const GpuKernels& on);
int64_t planned_scratch_bytes(const AttentionBwd& a, const Stream& s, const GpuKernels& on);

namespace cuda {

int64_t scratch_bytes(const AttentionFwd& a, const GpuKernels& on);
int64_t scratch_bytes(const AttentionBwd& a, const GpuKernels& on);

// Bytes for the f32 kernels of any GPU.
int64_t generic_scratch_bytes(const AttentionBwd& a);
// Bytes for the bf16 kernels of compute capability 8.0.
int64_t sm80_scratch_bytes(const AttentionBwd& a);

// Returns whether the Hopper kernels support the call. Heads of 96 and of 256 have only a backward pass here, by one
// path each (attention_slices.h), for the calls that it supports.
bool sm90_takes(const AttentionFwd& a);
bool sm90_takes(const AttentionBwd& a);
// Returns the bytes of scratch that Hopper's backward pass needs: sm90_sums_bytes() + sm90_path_bytes().
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

}  // namespace cuda
}  // namespace moebius
