#include "tokenizer/text_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "core/error.h"
#include "io/unicode.h"

namespace moebius {
namespace {

pcre2_match_data* data_of(const MatchScratch& scratch) { return static_cast<pcre2_match_data*>(scratch.match_data()); }
PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

std::string reason_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

// There is room for one pair of offsets, because groups are not used.
MatchScratch::MatchScratch()
    : data_(pcre2_match_data_create(1, nullptr),
            [](void* p) { pcre2_match_data_free(static_cast<pcre2_match_data*>(p)); }) {}

TextPattern TextPattern::literal(std::string text) {
  TextPattern pattern;
  pattern.text_ = std::move(text);
  return pattern;
}

TextPattern TextPattern::pcre(const std::string& expression) {
  TextPattern pattern;
  pattern.text_ = expression;
  int error = 0;
  size_t offset = 0;
  pcre2_code* code = pcre2_compile(units(expression), expression.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE,
                                   &error, &offset, nullptr);
  MOEBIUS_CHECK(input, code != nullptr,
                "expected a regular expression; got \"{}\", which is invalid at character {}: {}", expression, offset,
                reason_of(error));
  pattern.code_ = std::shared_ptr<pcre2_code>(code, pcre2_code_free);
  pattern.has_jit_ = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;  // optional: it changes speed only
  return pattern;
}

TextPattern TextPattern::regex(std::string_view expression, const std::string& who) {
  const std::string translated = pcre_of_onig(expression, who);
  try {
    return pcre(translated);
  } catch (const Error& error) {
    MOEBIUS_FAIL(input, "{}: {}; correct the file", who, error.what());
  }
}

TextPattern TextPattern::read(const JsonField& pattern) {
  if (pattern.has("String")) return literal(pattern.at("String").string());
  if (!pattern.has("Regex")) pattern.fail("{\"Regex\": ...} or {\"String\": ...}");
  return regex(pattern.at("Regex").string(), pattern.at("Regex").path());
}

bool TextPattern::find(std::string_view text, size_t from, MatchScratch& scratch, size_t* begin, size_t* end) const {
  if (code_ != nullptr) return find_regex(text, from, scratch, begin, end);
  const size_t at = text_.empty() ? std::string_view::npos : text.find(text_, from);
  if (at == std::string_view::npos) return false;
  *begin = at;
  *end = at + text_.size();
  return true;
}

bool TextPattern::find_regex(std::string_view text, size_t from, MatchScratch& scratch, size_t* begin,
                             size_t* end) const {
  pcre2_match_data* data = data_of(scratch);
  int found = PCRE2_ERROR_JIT_STACKLIMIT;
  if (has_jit_) found = pcre2_jit_match(code_.get(), units(text), text.size(), from, 0, data, nullptr);
  // The interpreter has its stack on the heap, so it can match longer texts than the JIT.
  if (found == PCRE2_ERROR_JIT_STACKLIMIT)
    found = pcre2_match(code_.get(), units(text), text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data, nullptr);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  MOEBIUS_CHECK(input, found >= 0, "tokenizer: expected \"{}\" to match in bounded time; got: {}; give it other text",
                text_, reason_of(found));
  const PCRE2_SIZE* pair = pcre2_get_ovector_pointer(data);
  *begin = pair[0];
  *end = pair[1];
  return true;
}

size_t TextPattern::after_char(std::string_view text, size_t at) {
  if (at == text.size()) return at + 1;
  next_char(text, &at);
  return at;
}

}  // namespace moebius
