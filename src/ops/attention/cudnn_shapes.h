// These functions say which calls cuDNN's attention computes, and with how much workspace. They hold for cuDNN 9.19 and
// do not need the library. This is host code and part of every build.
#pragma once

#include <cstdint>
#include <optional>

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_sizes.h"

namespace moebius::cuda {

// The keys of a sequence that cuDNN is given, and how they are masked.
struct CudnnKeys {
  int64_t rows;
  bool causal;  // false: every query attends to every key
};
// Returns the keys that cuDNN is given for the call. Returns nothing if cuDNN cannot compute it: another dtype
// than bf16, documents, widths that it lacks, too few rows, or keys that it cannot mask. The result does not
// depend on has_cudnn().
std::optional<CudnnKeys> cudnn_keys(const AttentionFwd& a);
std::optional<CudnnKeys> cudnn_keys(const AttentionBwd& a);

// The sequences, or kv heads of one sequence, that one call of the backward pass processes. cuDNN keeps a [rows,
// kv_rows] matrix of gradients for each head in its workspace, so the split bounds the workspace.
struct CudnnPart {
  int64_t batch, kv_heads;
};
CudnnPart cudnn_part(const AttentionSizes& z, int64_t batch);

// Returns the scratch for cuDNN: a bound for the version that was measured.
int64_t cudnn_scratch_bytes(const AttentionFwd& a);
int64_t cudnn_scratch_bytes(const AttentionBwd& a);
// The first bytes of the backward pass's scratch, which hold lse with heads first.
int64_t cudnn_lse_bytes(const AttentionBwd& a);

}  // namespace moebius::cuda
