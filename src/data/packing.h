// Whole documents into samples, for datasets in which a document is one piece: a completion and its prompt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/target_spans.h"

namespace moebius {

// Ranges of the stream of at most seq_len + 1 tokens, in order: each takes the documents that follow for as long as
// they fit whole (next fit). A document longer than that begins a sample and is cut, so that every sample after the
// first of it begins with the token that the one before ends with: no token but the first goes unpredicted.
//   document_begins: first tokens of the documents, then the number of tokens
std::vector<TokenSpan> pack_documents(std::span<const int64_t> document_begins, int64_t seq_len);

}  // namespace moebius
