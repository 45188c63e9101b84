// index_rows divides tokens into blocks, and keeps counts of each. This header is plain C++,
// since sizes are also needed where nothing runs.
#pragma once

#include "ops/token_blocks.h"

namespace moebius {

namespace cpu {
constexpr int64_t kTokensPerIndexBlock = 128;
// start_Be: rows of an expert in a block; then the row at which they start.
inline int64_t index_rows_scratch_bytes(int64_t num_tokens, int64_t num_experts) {
  return div_ceil(num_tokens, kTokensPerIndexBlock) * num_experts * int64_t{4};
}
}  // namespace cpu

namespace cuda {
constexpr int64_t kTokensPerIndexChunk = 256;
inline TokenBlocks index_blocks(int64_t num_tokens, int64_t num_experts) {
  return token_blocks(num_tokens, num_experts, kTokensPerIndexChunk);
}
// counts_Be: rows of an expert in a block.
inline int64_t index_rows_scratch_bytes(int64_t num_tokens, int64_t num_experts) {
  return index_blocks(num_tokens, num_experts).num_blocks * num_experts * int64_t{4};
}
}  // namespace cuda

}  // namespace moebius
