// Packs whole documents into samples, for datasets whose documents are a prompt and its completion.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/target_spans.h"

namespace moebius {

// Returns ranges of the stream of at most seq_len + 1 tokens, in order.
// Each range takes the documents that follow for as long as they fit whole (next fit).
// A longer document begins a sample and is cut. Each later sample of it begins with the last token
// of the one before. So every token of a document but its first is predicted once.
//   document_begins: the first token of each document, then the number of tokens
std::vector<TokenSpan> pack_documents(std::span<const int64_t> document_begins, int64_t seq_len);

}  // namespace moebius
