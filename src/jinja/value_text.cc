// str() and repr() of Python.
#include <fmt/format.h>
#include <utf8proc.h>

#include <array>
#include <charconv>
#include <cmath>

#include "io/unicode.h"
#include "jinja/value.h"

namespace moebius::jinja {
namespace {

bool is_printable(char32_t c) {
  if (c == U' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

std::string escaped(char32_t c) {
  if (c == U'\n') return "\\n";
  if (c == U'\r') return "\\r";
  if (c == U'\t') return "\\t";
  if (c <= 0xFF) return fmt::format("\\x{:02x}", static_cast<uint32_t>(c));
  if (c <= 0xFFFF) return fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
  return fmt::format("\\U{:08x}", static_cast<uint32_t>(c));
}

std::string text_repr(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, &at);
    if (c == U'\\' || c == static_cast<char32_t>(quote)) {
      out += '\\';
      out += static_cast<char>(c);
    } else if (is_printable(c)) {
      append_utf8(c, &out);
    } else {
      out += escaped(c);
    }
  }
  return out + quote;
}

std::string items_repr(Budget& budget, const std::vector<Value>& items, char open, char close) {
  std::string out(1, open);
  for (const Value& item : items) {
    if (out.size() > 1) out += ", ";
    out += to_repr(budget, item);
  }
  if (open == '(' && items.size() == 1) out += ',';
  return out + close;
}

std::string dict_repr(Budget& budget, const Dict& dict) {
  std::string out = "{";
  for (const auto& [key, value] : dict.items()) {
    if (out.size() > 1) out += ", ";
    out += to_repr(budget, key) + ": " + to_repr(budget, value);
  }
  return out + "}";
}

}  // namespace

// Returns the shortest digits that round-trip. Exponents below -4 and from 16 on are written.
std::string real_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 40> buffer{};
  const auto end = std::to_chars(buffer.begin(), buffer.end(), value, std::chars_format::scientific).ptr;
  const std::string scientific(buffer.begin(), end);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  const auto fixed_end = std::to_chars(buffer.begin(), buffer.end(), value, std::chars_format::fixed).ptr;
  std::string fixed(buffer.begin(), fixed_end);
  return fixed.find('.') == fixed.npos ? fixed + ".0" : fixed;
}

std::string to_text(Budget& budget, const Value& value) {
  if (value.is_text()) return value.text();
  return value.is_undefined() ? "" : to_repr(budget, value);
}

std::string to_repr(Budget& budget, const Value& value) {
  budget.step();
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "None";
  if (value.is<bool>()) return value.boolean() ? "True" : "False";
  if (value.is_integer()) return std::to_string(value.integer());
  if (value.is<double>()) return real_repr(value.real());
  if (value.is_text()) {
    budget.make(value.text().size());
    budget.step(static_cast<int64_t>(value.text().size() / 16));
    return text_repr(value.text());
  }
  if (value.is_list()) return items_repr(budget, value.items(), '[', ']');
  if (value.is_tuple()) return items_repr(budget, value.items(), '(', ')');
  if (value.is_dict()) return dict_repr(budget, value.dict());
  throw TemplateError(fmt::format("expected a value with a text; got an object of type '{}'", value.type_name()));
}

}  // namespace moebius::jinja
