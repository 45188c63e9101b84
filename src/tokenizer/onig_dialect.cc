// pcre_of_onig: translates Oniguruma's dialect, as far as pre-tokenizers use it.
#include "core/error.h"
#include "tokenizer/text_pattern.h"

namespace moebius {
namespace {

// The property White_Space, for use within a class. PCRE2's own \s includes U+180E too.
constexpr std::string_view kSpaces =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
constexpr std::string_view kWordChars = "\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}";

// PCRE2 before 10.40 does not know the prefix "sc:", but a script without prefix has
// that meaning there.
bool is_script(const std::string& name) {
  try {
    TextPattern::pcre("\\p{sc:" + name + "}");
    return true;
  } catch (const Error&) {
    return false;
  }
}

class Translator {
 public:
  Translator(std::string_view from, const std::string& who) : from_(from), who_(who) {}

  std::string run() {
    while (at_ < from_.size()) {
      const char c = from_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        class_char(c);
      } else {
        outer_char(c);
      }
    }
    return std::move(to_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    MOEBIUS_FAIL(input, "{}: expected a supported regular expression; got {} at byte {} of \"{}\"", who_, what, at_,
                 from_);
  }

  void copy(size_t count) {
    to_.append(from_.substr(at_, count));
    at_ += count;
  }

  void replace(size_t count, std::string_view by) {
    to_.append(by);
    at_ += count;
  }

  bool ahead(std::string_view text) const { return from_.substr(at_, text.size()) == text; }

  void escape() {
    if (at_ + 1 == from_.size()) refuse("a backslash at the end");
    const char c = from_[at_ + 1];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!letter) return copy(2);
    switch (c) {
      case 's':
        return replace(2, in_class_ ? std::string(kSpaces) : fmt::format("[{}]", kSpaces));
      case 'S':
        return replace(2, in_class_ ? "\\P{White_Space}" : fmt::format("[^{}]", kSpaces));
      case 'w':
        return replace(2, in_class_ ? std::string(kWordChars) : fmt::format("[{}]", kWordChars));
      case 'W':
        if (in_class_) refuse("\\W in a class");
        return replace(2, fmt::format("[^{}]", kWordChars));
      case 'd':
        return replace(2, "\\p{Nd}");
      case 'D':
        return replace(2, "\\P{Nd}");
      case 'u':
        return unicode_escape();
      case 'p':
      case 'P':
        if (at_ + 2 == from_.size() || from_[at_ + 2] != '{') refuse("\\p without braces");
        return property();
      case 'b':
        if (!in_class_) refuse("\\b");
        return copy(2);
      case 'r':
      case 'n':
      case 't':
      case 'f':
        return copy(2);
      case 'x':
        return braced_escape();
      default:
        refuse(fmt::format("\\{}", c));
    }
  }

  // The characters of a script, without those that PCRE2 adds because the script uses them too.
  void property() {
    const size_t end = from_.find('}', at_), name_at = at_ + (from_.substr(at_ + 3, 1) == "^" ? 4 : 3);
    if (end != std::string_view::npos && end > name_at &&
        is_script(std::string(from_.substr(name_at, end - name_at)))) {
      copy(name_at - at_);
      to_ += "sc:";
    }
    copy_to_brace();
  }

  // Copies \x{..} and \xHH, so that the braces are not taken for a repetition.
  void braced_escape() {
    if (from_.substr(at_ + 2, 1) == "{") return copy_to_brace();
    copy(2);
  }

  void copy_to_brace() {
    const size_t end = from_.find('}', at_);
    if (end == std::string_view::npos) refuse("braces without an end");
    copy(end + 1 - at_);
  }

  // Translates \uHHHH.
  void unicode_escape() {
    const std::string_view digits = from_.substr(at_ + 2, 4);
    if (digits.size() != 4 || digits.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos)
      refuse("\\u without four hexadecimal digits");
    replace(6, fmt::format("\\x{{{}}}", digits));
  }

  void class_char(char c) {
    if (c == '[') refuse("a class within a class");
    if (ahead("&&")) refuse("an intersection of classes");
    if (c == ']') in_class_ = false;
    copy(1);
  }

  void outer_char(char c) {
    if (c == '[') {
      in_class_ = true;
      copy(1 + (from_.substr(at_ + 1, 1) == "^" ? 1 : 0));
      if (ahead("]")) refuse("an empty class");
    } else if (c == '(') {
      open_group();
    } else {
      if (ahead("}+")) refuse("a + after {}");
      copy(1);
    }
  }

  void open_group() {
    if (ahead("(*")) refuse("a verb");
    if (!ahead("(?")) return copy(1);
    for (const std::string_view known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:", "(?i)"})
      if (ahead(known)) return copy(known.size());
    refuse(fmt::format("the group {}", from_.substr(at_, 4)));
  }

  std::string_view from_;
  const std::string& who_;
  std::string to_;
  size_t at_ = 0;
  bool in_class_ = false;
};

}  // namespace

std::string pcre_of_onig(std::string_view expression, const std::string& who) {
  return Translator(expression, who).run();
}

}  // namespace moebius
