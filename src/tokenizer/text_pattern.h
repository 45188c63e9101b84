// A pattern of a tokenizer.json: a literal string, or a regular expression in Oniguruma's (Ruby's)
// dialect. PCRE2 runs the expressions with its JIT compiler.
// An expression that has another meaning in PCRE2 is translated, or refused by name.
// Character classes are those of Unicode 16, whatever tables PCRE2 has.
// Before matching, characters that PCRE2's tables lack are replaced by similar older ones (io/unicode_later.h). So a
// range of characters that ends between a character and its substitute is wrong about that character.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "io/json_field.h"
#include "io/unicode_later.h"

struct pcre2_real_code_8;

namespace moebius {

// Scratch memory for matching. Each thread needs one, which serves all patterns.
class MatchScratch {
 public:
  MatchScratch();
  void* match_data() const { return data_.get(); }

 private:
  std::shared_ptr<void> data_;
};

class TextPattern {
 public:
  static TextPattern literal(std::string text);
  // Throws Error{input} "WHO: ..." for an expression that is invalid or cannot be translated.
  static TextPattern regex(std::string_view expression, const std::string& who);
  static TextPattern pcre(const std::string& expression);  // an expression of this program, in PCRE2's own dialect
  static TextPattern read(const JsonField& pattern);       // {"Regex": "..."} or {"String": "..."}

  // Finds the first match that begins at `from` or later. Returns false if there is none.
  // Throws Error{input} when matching takes too many steps of backtracking.
  // REQUIRES: valid UTF-8, and `from` is the start of a character.
  bool find(std::string_view text, size_t from, MatchScratch& scratch, size_t* begin, size_t* end) const;

  // Calls fn(begin, end, is_match) in order for the matches and for the text between them. An empty
  // literal never matches.
  template <class Fn>
  void for_each_span(std::string_view text, MatchScratch& scratch, Fn&& fn) const {
    std::string copy;
    if (code_ != nullptr) text = with_substitutes(text, &copy);
    size_t done = 0, from = 0, begin = 0, end = 0;
    while (from <= text.size() && find(text, from, scratch, &begin, &end)) {
      if (done < begin) fn(done, begin, false);
      if (begin < end) fn(begin, end, true);
      done = end;
      from = begin < end ? end : after_char(text, end);
    }
    if (done < text.size()) fn(done, text.size(), false);
  }

 private:
  static size_t after_char(std::string_view text, size_t at);
  bool find_regex(std::string_view text, size_t from, MatchScratch& scratch, size_t* begin, size_t* end) const;

  std::string text_;  // the literal, or the expression for messages
  std::shared_ptr<pcre2_real_code_8> code_;
  bool has_jit_ = false;
};

// Translates Oniguruma's dialect to PCRE2's. Throws Error{input} "WHO: ..." for expressions that
// have no translation here.
std::string pcre_of_onig(std::string_view expression, const std::string& who);

}  // namespace moebius
