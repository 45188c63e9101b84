// Ops that a GPU runs by slower kernels than it has, because of their shapes: noted where an op chooses, told by a run.
// In f32 no op notes anything: there no product runs on tensor cores, which a run says once.
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
  std::map<std::string, std::string, std::less<>> why;  // by op, as it was noted first
};

// why: what the fast kernels want and what they got. Kept by the accelerator of s.
inline void note_fallback_kernel(const Stream& s, std::string_view op, const std::string& why) {
  FallbackKernels& slow = s.accelerator().state<FallbackKernels>();
  if (!slow.why.contains(op)) slow.why.emplace(op, why);
}

// Of rows of `width` elements that are read one element at a time.
inline void note_odd_rows(const Stream& s, std::string_view op, DType dtype, int64_t width) {
  if (dtype != DType::bf16) return;
  note_fallback_kernel(
      s, op,
      fmt::format("vectors are read of rows of a multiple of 8 that begin at multiples of 16 bytes; got "
                  "rows of {}",
                  width));
}

// Of logits, whose rows are as long as the vocabulary that a rank has.
inline void note_odd_vocab(const Stream& s, std::string_view op, DType dtype, int64_t rows) {
  if (dtype != DType::bf16 || rows % 8 == 0) return;
  note_fallback_kernel(
      s, op,
      fmt::format("its products and its rows of logits want a vocabulary (model.vocab_size, or a tp rank's "
                  "part of it) of a multiple of 8; got {}",
                  rows));
}

// "slower kernels than this GPU has: attention_bwd, attention_fwd: why; gemm: why"; empty when nothing was noted.
// compute: what the run computes in.
std::string fallback_kernels_text(const FallbackKernels& slow, DType compute);
// Of several ranks, whose stages may differ. said: by rank. Once what all say, else what each says, with who says it.
std::vector<std::string> fallback_kernels_of_ranks(const std::vector<std::string>& said);

}  // namespace moebius
