// How kernels of a GPU divide tokens into blocks, where they number the tokens of each expert or of each rank. A block
// goes over its tokens in chunks, and stores its counts: tokens of each expert. Then every block adds the counts of all
// blocks before it. So more blocks have fewer chunks each, but read more counts. This header is plain C++, since sizes
// are also needed where nothing runs.
#pragma once

#include <algorithm>

#include "core/error.h"

namespace moebius {

struct TokenBlocks {
  int64_t num_blocks = 0, tokens_of_block = 0;  // tokens_of_block is a multiple of the tokens of a chunk
};

// num_counts: counts of a block.
inline TokenBlocks token_blocks(int64_t num_tokens, int64_t num_counts, int64_t tokens_of_chunk) {
  constexpr int64_t kBlocks = 128, kCounts = 4096;  // at least so many blocks before they have several chunks
  const int64_t most = std::max(kBlocks, kCounts / std::max<int64_t>(1, num_counts));
  const int64_t chunks = div_ceil(num_tokens, tokens_of_chunk);
  const int64_t tokens_of_block = div_ceil(chunks, most) * tokens_of_chunk;
  return {.num_blocks = tokens_of_block == 0 ? 0 : div_ceil(num_tokens, tokens_of_block),
          .tokens_of_block = tokens_of_block};
}

}  // namespace moebius
