// The "decoder" of a tokenizer.json, which turns tokens back into text.
// Supported: ByteLevel ByteFallback Fuse Strip Replace Metaspace Sequence.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/text_pattern.h"

namespace moebius {

class TokenDecoder {
 public:
  using Step = std::function<void(std::vector<std::string>* tokens, MatchScratch&)>;

  TokenDecoder() = default;  // joins tokens with spaces
  // Throws Error{input} that names the type when it is none of the above.
  static TokenDecoder read(const JsonField& field);

  // Returns the text of the tokens. Bytes that are not valid UTF-8 become U+FFFD.
  std::string decode(std::vector<std::string> tokens, MatchScratch& scratch) const;

 private:
  void add(const JsonField& field);

  std::vector<Step> steps_;
  std::string separator_ = " ";
};

}  // namespace moebius
