// The choice between our attention kernels and cuDNN's on a Hopper GPU, for shapes that both can compute.
//
// It is a table of the faster kernels, measured with `moebius bench attention`. The choice depends on the shape alone,
// never on a clock, so that all ranks agree and a resumed run computes the same bits.
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
