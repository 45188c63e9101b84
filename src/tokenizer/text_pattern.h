// What tokenizer.json calls a pattern: a literal string, or a regular expression in Oniguruma's (Ruby's) dialect, run
// by PCRE2 with its JIT. What the two dialects mean differently is translated or refused by name; classes are those of
// Unicode 16 whatever PCRE2's tables. For later characters stand-ins are matched (io/unicode_later.h), so that a range
// which ends between the two is wrong about them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "io/json_field.h"
#include "io/unicode_later.h"

struct pcre2_real_code_8;

namespace moebius {

// What matching needs beside the pattern; one for each thread, for all patterns.
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
  // Error{input} "WHO: ..." for an expression that is invalid or beyond what is translated.
  static TextPattern regex(std::string_view expression, const std::string& who);
  static TextPattern pcre(const std::string& expression);  // PCRE2's own dialect, for expressions in this program
  static TextPattern read(const JsonField& pattern);       // {"Regex": "..."} or {"String": "..."}

  // The first match that begins at `from` or later. REQUIRES: valid UTF-8 and `from` at a character.
  // Error{input} when the expression backtracks without end.
  bool find(std::string_view text, size_t from, MatchScratch& scratch, size_t* begin, size_t* end) const;

  // fn(begin, end, is_match) for the matches and for what lies between them, in order; an empty literal never matches.
  template <class Fn>
  void for_each_span(std::string_view text, MatchScratch& scratch, Fn&& fn) const {
    std::string copy;
    if (code_ != nullptr) text = with_stand_ins(text, &copy);
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

// Oniguruma's dialect in PCRE2's words; Error{input} "WHO: ..." for what has no translation here.
std::string pcre_of_onig(std::string_view expression, const std::string& who);

}  // namespace moebius
