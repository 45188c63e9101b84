// On a GPU destinations() divides the tokens into blocks, and counts the destinations of each. This header is plain
// C++, since a dry run needs the size of the scratch too.
#pragma once

#include "ops/token_blocks.h"

namespace moebius::cuda {

constexpr int64_t kTokensPerDestinationChunk = 128;  // a thread owns a token
inline TokenBlocks destination_blocks(int64_t num_tokens, int64_t num_ranks) {
  return token_blocks(num_tokens, num_ranks, kTokensPerDestinationChunk);
}
// Returns the bytes of counts_BP, i32: the number of tokens of each block for each ep rank.
inline int64_t destination_scratch_bytes(int64_t num_tokens, int64_t num_ranks) {
  return destination_blocks(num_tokens, num_ranks).num_blocks * num_ranks * int64_t{4};
}

}  // namespace moebius::cuda
