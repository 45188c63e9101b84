// Documents of a dataset as text, with the parts on which the loss is computed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/token_data.h"
#include "tokenizer/tokenizer.h"

namespace moebius {

// Neighbouring tokens of a document that are all targets of the loss, or all not.
struct DocumentPart {
  bool has_loss = false;
  std::vector<int32_t> ids;
};

// Returns the parts of the first max_tokens tokens of a document, in order. REQUIRES: the document exists.
std::vector<DocumentPart> document_parts(const TokenDataset& data, int64_t document, int64_t max_tokens);

// Returns the text of ids between quotation marks, as JSON writes it. An end-of-document id that has no text, as that
// of "bytes", ends the quotation, as in "day" + end. REQUIRES: ids of the tokenizer's vocabulary.
std::string quoted_text(const std::vector<int32_t>& ids, const Tokenizer& tokenizer);

}  // namespace moebius
