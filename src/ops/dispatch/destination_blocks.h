// destinations divides tokens into blocks on a GPU, and keeps counts of each. This header is plain C++, since sizes are
// also needed where nothing runs.
#pragma once

#include "ops/token_blocks.h"

namespace moebius::cuda {

constexpr int64_t kTokensPerDestinationChunk = 128;  // a thread owns a token
inline TokenBlocks destination_blocks(int64_t num_tokens, int64_t num_ranks) {
  return token_blocks(num_tokens, num_ranks, kTokensPerDestinationChunk);
}
// counts_BP: tokens of a block for an ep rank.
inline int64_t destination_scratch_bytes(int64_t num_tokens, int64_t num_ranks) {
  return destination_blocks(num_tokens, num_ranks).num_blocks * num_ranks * int64_t{4};
}

}  // namespace moebius::cuda
