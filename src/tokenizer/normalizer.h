// The "normalizer" of a tokenizer.json, which changes text before it is split into words.
// Supported: NFC NFD NFKC NFKD Lowercase Strip Replace Prepend Sequence.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/text_pattern.h"

namespace moebius {

class Normalizer {
 public:
  using Step = std::function<void(std::string* text, MatchScratch&)>;

  Normalizer() = default;  // does not change text
  // Throws Error{input} that names the type when it is none of the above.
  static Normalizer read(const JsonField& field);

  bool is_identity() const { return steps_.empty(); }
  // Normalizes `text` in place. REQUIRES: valid UTF-8.
  void apply(std::string* text, MatchScratch& scratch) const;

 private:
  void add(const JsonField& field);

  std::vector<Step> steps_;
};

enum class UnicodeForm { nfc, nfd, nfkc, nfkd };

// Returns `text` in a Unicode normalization form. It takes O(n log n), even where all of the text
// is combining marks.
// REQUIRES: valid UTF-8.
std::string unicode_normalize(std::string_view text, UnicodeForm form);

}  // namespace moebius
