// The "normalizer" of a tokenizer.json: what happens to text before it is cut into words.
// Read: NFC NFD NFKC NFKD Lowercase Strip Replace Prepend Sequence.
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

  Normalizer() = default;  // leaves text alone
  // Error{input} naming the type when it is none of the above.
  static Normalizer read(const JsonField& field);

  bool is_identity() const { return steps_.empty(); }
  // REQUIRES: valid UTF-8.
  void apply(std::string* text, MatchScratch& scratch) const;

 private:
  void add(const JsonField& field);

  std::vector<Step> steps_;
};

enum class UnicodeForm { nfc, nfd, nfkc, nfkd };

// In O(n log n) also for text of combining marks alone. REQUIRES: valid UTF-8.
std::string unicode_normalize(std::string_view text, UnicodeForm form);

}  // namespace moebius
