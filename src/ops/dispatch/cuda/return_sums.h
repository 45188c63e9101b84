// return_sums on a Hopper GPU, where the bulk copy engine loads the rows of y into shared memory.
#pragma once

#include "ops/dispatch/cuda/windows.h"

namespace moebius::cuda {

inline constexpr int kMaxPairsPipelined = 32;  // pairs of a row: a lane of a warp looks up one

// Runs return_sums for at most `max_rows` rows; y is f32 or bf16 [R, D]. The bits are those of the kernel for other
// GPUs (rows.cu). REQUIRES: at most kMaxPairsPipelined pairs of a row; rows of y and of the windows begin at
// multiples of 16 bytes.
void pipelined_sums(Stream& s, const Tensor& y_RD, int64_t max_rows, const Return& a, const Windows& to);

}  // namespace moebius::cuda
