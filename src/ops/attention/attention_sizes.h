// The sizes of an attention call, for the CUDA kernels and the plan of their scratch. Host code only, part of
// every build.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"

namespace moebius::cuda {

// Rows are those of one sequence. Query i has the position of key shift + i, which a part may lack.
struct AttentionSizes {
  int64_t rows, kv_rows, shift;
  int64_t kv_first;  // the position of key 0
  int heads, kv_heads, width, v_width;
  int64_t window;
  float scale;
  const int32_t* doc_start;  // positions, or null
};
AttentionSizes attention_sizes(const AttentionFwd& a);
AttentionSizes attention_sizes(const AttentionBwd& a);

}  // namespace moebius::cuda
