// The ops that ran on fallback kernels of a GPU because of their shapes.
// An op notes this where it chooses a kernel, and the run reports it.
// In f32 ops note nothing: no product uses tensor cores there, and the run reports that once.
#pragma once

#include <fmt/core.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "device/accelerator.h"
#include "device/device.h"

namespace moebius {

struct FallbackKernels {
  std::map<std::string, std::string, std::less<>> why;  // the first reason noted, by op
};

// why: what the faster kernels require, and what they got. The accelerator of s keeps the first note of each op.
inline void note_fallback_kernel(const Stream& s, std::string_view op, const std::string& why) {
  FallbackKernels& noted = s.accelerator().state<FallbackKernels>();
  if (!noted.why.contains(op)) noted.why.emplace(op, why);
}

// Notes that rows of `width` elements are read one element at a time.
inline void note_odd_rows(const Stream& s, std::string_view op, DType dtype, int64_t width) {
  if (dtype != DType::bf16) return;
  note_fallback_kernel(
      s, op,
      fmt::format("vector loads need rows of a multiple of 8 elements that begin at multiples of 16 bytes; "
                  "got rows of {}",
                  width));
}

// Notes that rows of logits, as long as a rank's part of the vocabulary, are not a multiple of 8 elements.
inline void note_odd_vocab(const Stream& s, std::string_view op, DType dtype, int64_t rows) {
  if (dtype != DType::bf16 || rows % 8 == 0) return;
  note_fallback_kernel(
      s, op,
      fmt::format("its products and its rows of logits need a vocabulary (model.vocab_size, or a tp rank's "
                  "part of it) that is a multiple of 8; got {}",
                  rows));
}

// Returns "fallback kernels: attention_bwd, attention_fwd: why; gemm: why"; empty when nothing was
// noted. compute: the dtype that the run computes in.
std::string fallback_kernels_text(const FallbackKernels& noted, DType compute);
// Merges the messages of several ranks, whose stages may differ. by_rank: a message per rank.
// A message that all ranks share is returned once; otherwise each comes with the ranks
// that have it.
std::vector<std::string> fallback_kernels_of_ranks(const std::vector<std::string>& by_rank);

}  // namespace moebius
