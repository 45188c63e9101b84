// unicode_normalize, based on utf8proc's tables. The ordering of combining marks is our own,
// because that of utf8proc is quadratic.
#include <utf8proc.h>

#include <algorithm>

#include "core/error.h"
#include "io/unicode.h"
#include "io/unicode_later.h"
#include "tokenizer/normalizer.h"

namespace moebius {
namespace {

constexpr int kMaxDecomposed = 18;  // the most characters that one becomes, for U+FDFA

utf8proc_option_t options_of(UnicodeForm form) {
  int options = UTF8PROC_STABLE;
  options |= form == UnicodeForm::nfc || form == UnicodeForm::nfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == UnicodeForm::nfkc || form == UnicodeForm::nfkd) options |= UTF8PROC_COMPAT;
  return static_cast<utf8proc_option_t>(options);
}

int combining_class(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

void order_marks(std::vector<utf8proc_int32_t>* chars) {
  const auto is_mark = [](utf8proc_int32_t c) { return combining_class(c) != 0; };
  for (auto begin = chars->begin(); begin != chars->end();) {
    begin = std::find_if(begin, chars->end(), is_mark);
    const auto end = std::find_if_not(begin, chars->end(), is_mark);
    std::stable_sort(begin, end, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    begin = end;
  }
}

void append_run(std::vector<utf8proc_int32_t>* chars, utf8proc_option_t options, std::string* out) {
  order_marks(chars);
  const auto count = utf8proc_normalize_utf32(chars->data(), static_cast<utf8proc_ssize_t>(chars->size()), options);
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(static_cast<char32_t>((*chars)[i]), out);
  chars->clear();
}

// A character that utf8proc's tables lack is its own normal form, and nothing combines across it.
void append_normal(std::string_view text, utf8proc_option_t options, std::string* out) {
  std::vector<utf8proc_int32_t> chars;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, &at);
    if (has_later_form(c)) {
      append_run(&chars, options, out);
      append_utf8(c, out);
      continue;
    }
    utf8proc_int32_t parts[kMaxDecomposed];
    int last_class = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts, kMaxDecomposed, options, &last_class);
    MOEBIUS_ASSERT(0 <= count && count <= kMaxDecomposed);
    chars.insert(chars.end(), parts, parts + count);
  }
  append_run(&chars, options, out);
}

bool is_ascii(char c) { return static_cast<uint8_t>(c) < 0x80; }

}  // namespace

// ASCII text is normal. Other characters change an ASCII character only if it is right before them.
std::string unicode_normalize(std::string_view text, UnicodeForm form) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t other = std::find_if_not(text.begin(), text.end(), is_ascii) - text.begin();
    const size_t plain = other == text.size() || other == 0 ? other : other - 1;
    out.append(text.substr(0, plain));
    text.remove_prefix(plain);
    if (text.empty()) break;
    const auto marks = std::find_if_not(text.begin(), text.end(), is_ascii);
    const size_t mixed = std::find_if(marks, text.end(), is_ascii) - text.begin();
    append_normal(text.substr(0, mixed), options_of(form), &out);
    text.remove_prefix(mixed);
  }
  return out;
}

}  // namespace moebius
