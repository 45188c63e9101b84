// The choice between our kernels and cuDNN's for attention of a shape that both can compute, on a
// Hopper GPU.
//
// It was made by measurement, once: `moebius bench attention` times both, and this is the
// table of the faster ones. It is a function of the shape alone. So ranks agree, a run that is
// resumed computes the bits of one that was not, and no choice depends on a clock.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"

namespace moebius {

// The sizes that the choice depends on.
struct AttentionShape {
  int64_t batch = 1, rows = 0, kv_rows = 0;  // sequences, and the rows of one
  int64_t heads = 1, kv_heads = 1, width = 0, v_width = 0;
  int64_t window = 0;  // 0, or shorter than the sequence
};
AttentionShape attention_shape(const AttentionFwd& a);
AttentionShape attention_shape(const AttentionBwd& a);

// Returns whether cuDNN's kernels are the faster ones.
bool cudnn_is_faster_fwd(const AttentionShape& z);
bool cudnn_is_faster_bwd(const AttentionShape& z);

}  // namespace moebius
