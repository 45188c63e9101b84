// The loss of rows of logits, and its derivative w.r.t. the logits, in one pass over
// the logits. The kernels of lm_loss share it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/device.h"

namespace moebius::cuda {

template <class T>
struct LossRows {
  float* loss;
  T* dlogits;                                      // null without gradients
  const float *logits, *weight, *scale_in_memory;  // the last one may be null
  const int32_t* target;
  int vocab;
  float scale;
};

// The state of a block for its part of a row: a number near the largest logit, and the sum of
// e^(logit - max).
struct LossPart {
  float max, sum;
};

// Copies the next rows to shared memory while it works on one. Returns false, and does nothing, if a
// row is too long for that. REQUIRES: rows of logits at multiples of 16 bytes, those of dlogits at
// multiples of 4 elements.
template <class T>
bool prefetched_loss_rows(Stream& s, const LossRows<T>& a, int64_t rows);

// The loss of rows on Hopper. aligned: what prefetched_loss_rows requires.
template <class T>
void hopper_loss_rows(Stream& s, const LossRows<T>& a, int64_t rows, bool aligned);

}  // namespace moebius::cuda
