// These functions say which calls cuDNN's attention computes, and with how much workspace. They are facts of cuDNN 9.19
// and do not need the library. Host code only, part of every build.
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
// Returns nothing if cuDNN cannot compute the call: its dtype, widths or documents, few rows, or keys that it cannot
// mask. Does not ask whether there is a cuDNN.
std::optional<CudnnKeys> cudnn_keys(const AttentionFwd& a);
std::optional<CudnnKeys> cudnn_keys(const AttentionBwd& a);

// The sequences, or kv heads of one sequence, that one call of the backward pass processes. cuDNN keeps a [rows,
// kv_rows] matrix of gradients for each head in its workspace, which is bounded so.
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
