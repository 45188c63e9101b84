// Incremental detokenisation: the text of a sequence of tokens, piece by piece.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace moebius {

class TextStream {
 public:
  // The text ends before the first of the strings `stops` that appears in it.
  // Throws Error{usage} for an empty one.
  TextStream(const Tokenizer& tokenizer, std::vector<std::string> stops);

  // Takes a token, and returns the text that is certain now: whole characters, and nothing that may
  // become a stop string.
  std::string add(int32_t id);
  // Returns the text that was held back. Call it after the last token.
  std::string rest();
  bool is_stopped() const { return is_stopped_; }    // by a stop string
  const std::string& text() const { return text_; }  // all text returned so far

 private:
  std::string emit(size_t count);
  void hold_back(const std::string& piece);

  const Tokenizer& tokenizer_;
  std::vector<std::string> stops_;
  std::vector<int32_t> ids_;
  size_t first_ = 0, read_ = 0;  // ids_[first_, read_) give context to the next ones; those before are done
  std::string held_, text_;
  bool is_stopped_ = false;
};

}  // namespace moebius
