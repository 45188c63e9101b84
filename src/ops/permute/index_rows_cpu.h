// How the CPU cuts index_rows into tasks.
#pragma once

#include "core/error.h"

namespace moebius::cpu {

constexpr int64_t kTokensPerIndexBlock = 128;
inline int64_t index_rows_blocks(int64_t num_tokens) { return div_ceil(num_tokens, kTokensPerIndexBlock); }

}  // namespace moebius::cpu
