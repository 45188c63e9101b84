#include "jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "io/unicode.h"
#include "jinja/budget.h"

namespace moebius::jinja {
namespace {

std::string normalized(std::string_view source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      text += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

bool is_name_start(char c) {
  return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<uint8_t>(c) >= 0x80;
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

void strip_end(std::string* text) {
  while (!text->empty()) {
    const size_t begin = previous_char(*text, text->size());
    size_t at = begin;
    if (!is_python_space(next_char(*text, &at))) return;
    text->resize(begin);
  }
}

class Lexer {
 public:
  Lexer(std::string_view source, int* line) : source_(source), line_(*line) { line_ = 1; }

  std::vector<Token> run() {
    while (at_ < source_.size()) text();
    add(Token::Kind::end, "");
    return std::move(tokens_);
  }

 private:
  bool is_next(std::string_view s) const { return std::string_view(source_).substr(at_).starts_with(s); }
  void add(Token::Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  void advance(size_t count) {
    line_ += static_cast<int>(std::count(source_.begin() + at_, source_.begin() + at_ + count, '\n'));
    at_ += count;
  }
  void skip_spaces() {
    while (at_ < source_.size()) {
      size_t next = at_;
      if (!is_python_space(next_char(source_, &next))) return;
      advance(next - at_);
    }
  }
  // The newline after a tag, which trim_blocks removes.
  void skip_newline() {
    if (at_ < source_.size() && source_[at_] == '\n') advance(1);
  }

  // Text up to the next tag, and the tag.
  void text() {
    size_t begin = at_;
    while (begin < source_.size() && !is_tag(begin)) ++begin;
    std::string data(source_.substr(at_, begin - at_));
    const bool is_print = begin < source_.size() && source_[begin + 1] == '{';
    if (begin < source_.size()) strip_before(begin, !is_print, &data);
    if (!data.empty()) add(Token::Kind::text, data);
    advance(begin - at_);
    if (at_ < source_.size()) tag();
    line_starts_ = at_ > 0 && source_[at_ - 1] == '\n';
  }
  bool is_tag(size_t at) const {
    const std::string_view here = std::string_view(source_).substr(at);
    return here.starts_with("{{") || here.starts_with("{%") || here.starts_with("{#");
  }
  void strip_before(size_t tag, bool is_block, std::string* data) const {
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (sign == '-') return strip_end(data);
    if (sign == '+' || !is_block) return;
    const size_t newline = data->rfind('\n');
    if (newline == std::string::npos && !line_starts_) return;
    const size_t line = newline == std::string::npos ? 0 : newline + 1;
    std::string rest = data->substr(line);
    strip_end(&rest);
    if (rest.empty()) data->resize(line);
  }

  void tag() {
    const char kind = source_[at_ + 1];
    if (kind == '#') return comment();
    size_t after = at_ + 2;
    if (after < source_.size() && (source_[after] == '-' || source_[after] == '+')) ++after;
    if (kind == '%' && is_raw(after)) return raw();
    add(kind == '{' ? Token::Kind::print_begin : Token::Kind::block_begin, "");
    advance(after - at_);
    code(kind == '{');
  }

  void comment() {
    const size_t end = source_.find("#}", at_ + 2);
    if (end == std::string::npos) throw TemplateError("expected #} to end a comment; got the end of the template");
    const char sign = source_[end - 1];
    const bool has_sign = end > at_ + 2;
    advance(end + 2 - at_);
    if (has_sign && sign == '-') return skip_spaces();
    if (!(has_sign && sign == '+')) skip_newline();
  }

  size_t spaces_from(size_t at) const {
    while (at < source_.size() && (source_[at] == ' ' || (source_[at] >= '\t' && source_[at] <= '\r'))) ++at;
    return at;
  }
  bool is_raw(size_t at) const {
    at = spaces_from(at);
    if (!std::string_view(source_).substr(at).starts_with("raw")) return false;
    const std::string_view rest = std::string_view(source_).substr(spaces_from(at + 3));
    return rest.starts_with("%}") || rest.starts_with("-%}");
  }
  // {% raw %} ... {% endraw %}: text as it is.
  void raw() {
    const size_t open = source_.find("%}", at_);
    const bool strips = source_[open - 1] == '-';
    advance(open + 2 - at_);
    if (strips) skip_spaces();
    for (size_t from = at_;;) {
      const size_t begin = source_.find("{%", from);
      if (begin == std::string::npos) throw TemplateError("expected {% endraw %}; got the end of the template");
      size_t at = begin + 2;
      if (at < source_.size() && (source_[at] == '-' || source_[at] == '+')) ++at;
      at = spaces_from(at);
      from = begin + 2;
      if (!std::string_view(source_).substr(at).starts_with("endraw")) continue;
      at = spaces_from(at + 6);
      const char sign = at < source_.size() ? source_[at] : ' ';
      if (sign == '-' || sign == '+') ++at;
      if (!std::string_view(source_).substr(at).starts_with("%}")) continue;
      return end_raw(begin, at + 2, sign);
    }
  }
  void end_raw(size_t begin, size_t after, char sign) {
    std::string data(source_.substr(at_, begin - at_));
    line_starts_ = false;
    strip_before(begin, true, &data);
    if (!data.empty()) add(Token::Kind::text, data);
    advance(after - at_);
    if (sign == '-') return skip_spaces();
    if (sign != '+') skip_newline();
  }

  // The tokens of a tag up to its end.
  void code(bool is_print) {
    std::vector<char> open;
    for (;;) {
      skip_spaces();
      if (at_ == source_.size()) throw TemplateError("expected the end of a tag; got the end of the template");
      if (open.empty() && end_of_tag(is_print)) return;
      token(&open);
    }
  }
  bool end_of_tag(bool is_print) {
    const std::string_view close = is_print ? "}}" : "%}";
    const bool minus = source_[at_] == '-', plus = !is_print && source_[at_] == '+';
    if (!std::string_view(source_).substr(at_ + (minus || plus ? 1 : 0)).starts_with(close)) return false;
    add(is_print ? Token::Kind::print_end : Token::Kind::block_end, "");
    advance(close.size() + (minus || plus ? 1 : 0));
    if (minus)
      skip_spaces();
    else if (!is_print && !plus)
      skip_newline();
    return true;
  }

  void token(std::vector<char>* open) {
    const char c = source_[at_];
    if (c == '\'' || c == '"') return literal(c);
    if (is_digit(c)) return number();
    if (is_name_start(c)) return name();
    constexpr std::array<std::string_view, 7> kLong{"==", "!=", ">=", "<=", "//", "**", "=="};
    for (const std::string_view symbol : kLong) {
      if (!is_next(symbol)) continue;
      add(Token::Kind::symbol, std::string(symbol));
      return advance(2);
    }
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos)
      throw TemplateError(fmt::format("expected an expression; got the character '{}'", c));
    if (c == '(' || c == '[' || c == '{') open->push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (c == ')' || c == ']' || c == '}') {
      if (open->empty() || open->back() != c)
        throw TemplateError(fmt::format("expected matching brackets; got '{}'", c));
      open->pop_back();
    }
    add(Token::Kind::symbol, std::string(1, c));
    advance(1);
  }

  void name() {
    const size_t begin = at_;
    while (at_ < source_.size() && (is_name_start(source_[at_]) || is_digit(source_[at_]))) ++at_;
    add(Token::Kind::name, std::string(source_.substr(begin, at_ - begin)));
  }

  void number() {
    std::string digits;
    bool is_real = false;
    const char kind = at_ + 1 < source_.size() ? static_cast<char>(source_[at_ + 1] | 0x20) : ' ';
    if (source_[at_] == '0' && (kind == 'x' || kind == 'o' || kind == 'b')) return based_number(kind);
    const auto take_digits = [&] {
      while (at_ < source_.size() && (is_digit(source_[at_]) ||
                                      (source_[at_] == '_' && at_ + 1 < source_.size() && is_digit(source_[at_ + 1]))))
        if (const char c = source_[at_++]; c != '_') digits += c;
    };
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    take_digits();
    if (!after_dot && at_ + 1 < source_.size() && source_[at_] == '.' && is_digit(source_[at_ + 1])) {
      digits += source_[at_++];
      take_digits();
      is_real = true;
    }
    if (!after_dot && at_ + 1 < source_.size() && (source_[at_] | 0x20) == 'e') {
      const size_t sign = source_[at_ + 1] == '-' || source_[at_ + 1] == '+' ? 1 : 0;
      if (at_ + 1 + sign < source_.size() && is_digit(source_[at_ + 1 + sign])) {
        digits += source_.substr(at_, 1 + sign);
        at_ += 1 + sign;
        take_digits();
        is_real = true;
      }
    }
    add(is_real ? Token::Kind::real : Token::Kind::integer, digits);
  }
  void based_number(char kind) {
    const int base = kind == 'x' ? 16 : kind == 'o' ? 8 : 2;
    std::string digits;
    for (at_ += 2; at_ < source_.size() && (is_hex(source_[at_]) || source_[at_] == '_'); ++at_)
      if (source_[at_] != '_') digits += source_[at_];
    try {
      add(Token::Kind::integer, std::to_string(std::stoll(digits, nullptr, base)));
    } catch (const std::logic_error&) {
      throw TemplateError(fmt::format("expected a number of base {} in 64 bits; got \"{}\"", base, digits));
    }
  }

  // A string, with the escapes of Python.
  void literal(char quote) {
    const int line = line_;
    std::string text;
    for (advance(1);;) {
      if (at_ >= source_.size()) throw TemplateError("expected the end of a string; got the end of the template");
      const char c = source_[at_];
      advance(1);
      if (c == quote) break;
      if (c == '\\')
        escape(&text);
      else
        text += c;
    }
    tokens_.push_back({Token::Kind::text_literal, std::move(text), line});
  }
  void escape(std::string* text) {
    if (at_ >= source_.size()) throw TemplateError("expected the end of a string; got the end of the template");
    const char c = source_[at_];
    advance(1);
    constexpr std::string_view kNames = "ntrabfv0\\'\"", kValues("\n\t\r\a\b\f\v\0\\'\"", 11);
    if (c == '\n') return;
    if (c == 'x') return code_point(2, text);
    if (c == 'u') return code_point(4, text);
    if (c == 'U') return code_point(8, text);
    if (c == 'N') throw TemplateError("expected no character by its name, \\N{...}; write it out");
    if (c >= '0' && c <= '7') {
      --at_;
      char32_t value = 0;
      for (int i = 0; i < 3 && at_ < source_.size() && source_[at_] >= '0' && source_[at_] <= '7'; ++i)
        value = value * 8 + static_cast<char32_t>(source_[at_++] - '0');
      return append_utf8(value, text);
    }
    const size_t known = kNames.find(c);
    if (known != std::string_view::npos) {
      *text += kValues[known];
    } else {
      *text += '\\';
      *text += c;
    }
  }
  void code_point(size_t num_digits, std::string* text) {
    const std::string digits(source_.substr(at_, num_digits));
    if (digits.size() < num_digits || !std::all_of(digits.begin(), digits.end(), is_hex))
      throw TemplateError(fmt::format("expected {} hexadecimal digits in a string; got \"{}\"", num_digits, digits));
    const auto value = static_cast<char32_t>(std::stoul(digits, nullptr, 16));
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000))
      throw TemplateError(fmt::format("expected a character of Unicode in a string; got \"{}\"", digits));
    append_utf8(value, text);
    advance(num_digits);
  }

  std::string source_;
  int& line_;
  size_t at_ = 0;
  bool line_starts_ = true;
  std::vector<Token> tokens_;

 public:
  static std::vector<Token> tokens(std::string_view source, int* line) {
    const std::string text = normalized(source);
    return Lexer(text, line).run();
  }
};

}  // namespace

bool is_python_space(char32_t c) { return (c >= 0x1C && c <= 0x1F) || is_white_space(c); }

std::vector<Token> tokens_of(std::string_view source, int* line) { return Lexer::tokens(source, line); }

}  // namespace moebius::jinja
