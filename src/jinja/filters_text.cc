// Filters of texts, and what they share with the methods of str.
#include <fmt/format.h>
#include <fmt/printf.h>
#include <utf8proc.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "io/unicode.h"
#include "jinja/filters.h"
#include "jinja/lexer.h"

namespace moebius::jinja {
namespace {

// Returns whether the character has a case rule that is not supported: Python maps some characters to several, and a
// sigma depends on its position in the word.
bool has_special_case(char32_t c) {
  return c == 0xDF || c == 0x130 || c == 0x149 || c == 0x1F0 || c == 0x390 || c == 0x3B0 || c == 0x3A3 || c == 0x587 ||
         (c >= 0x1E96 && c <= 0x1E9E) || (c >= 0x1F50 && c <= 0x1FFC) || (c >= 0xFB00 && c <= 0xFB17);
}

std::string mapped(std::string_view text, char32_t (*map)(char32_t, bool after_letter)) {
  std::string out;
  bool after_letter = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, &at);
    if (has_special_case(c))
      throw TemplateError(fmt::format("expected characters whose cases are one character each; got U+{:04X}",
                                      static_cast<uint32_t>(c)));
    append_utf8(map(c, after_letter), &out);
    const auto code = static_cast<utf8proc_int32_t>(c);
    after_letter = utf8proc_tolower(code) != utf8proc_toupper(code);
  }
  return out;
}

char32_t upper_of(char32_t c) { return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))); }
char32_t lower_of(char32_t c) { return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))); }
char32_t title_of(char32_t c) { return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))); }

// The filter title begins words after spaces and some brackets only, unlike the method of str.
std::string title_words(std::string_view text) {
  std::string out;
  size_t begin = 0;
  const auto flush = [&](size_t end) {
    out += capitalize(text.substr(begin, end - begin));
    begin = end;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t here = at;
    const char32_t c = next_char(text, &at);
    if (!is_python_space(c) && std::u32string_view(U"-({[<").find(c) == std::u32string_view::npos) continue;
    flush(here);
    out += text.substr(here, at - here);
    begin = at;
  }
  flush(text.size());
  return out;
}

Value upper_filter(Runtime& r, const Value& input, const Arguments&) { return r.text(upper(r.str(input))); }
Value lower_filter(Runtime& r, const Value& input, const Arguments&) { return r.text(lower(r.str(input))); }
Value capitalize_filter(Runtime& r, const Value& input, const Arguments&) { return r.text(capitalize(r.str(input))); }
Value title_filter(Runtime& r, const Value& input, const Arguments&) { return r.text(title_words(r.str(input))); }

Value trim(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("trim", arguments, {"chars"});
  const std::string text = runtime.str(input), characters = p.is_none(0) ? "" : p.text(0);
  return runtime.text(std::string(strip(text, p.is_none(0) ? nullptr : &characters)));
}

Value replace(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("replace", arguments, {"old", "new", "count"});
  return replace_all(runtime.budget(), runtime.str(input), runtime.str(p.at(0)), runtime.str(p.at(1)),
                     p.is_none(2) ? -1 : p.integer(2));
}

Value indent(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("indent", arguments, {"width", "first", "blank"});
  if (!input.is_text()) throw TemplateError(fmt::format("indent: expected a string; got '{}'", input.type_name()));
  std::string before;
  if (p.has(0) && p.at(0).is_text())
    before = p.text(0);
  else
    before = repeat(runtime.budget(), " ", p.integer_or(0, 4));
  const std::vector<std::string> lines = lines_of(runtime.str(input) + "\n");
  std::string out = p.truth_or(1, false) ? before : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    runtime.budget().make(before.size() + lines[i].size());
    if (i > 0) out += '\n';
    if (i > 0 && (p.truth_or(2, false) || !lines[i].empty())) out += before;
    out += lines[i];
  }
  return out;
}

Value format(Runtime& runtime, const Value& input, const Arguments& arguments) {
  if (!arguments.named.empty()) throw TemplateError("format: expected arguments without names; got one with a name");
  return runtime.text(percent_format(runtime, runtime.str(input), Value::tuple(arguments.positional)));
}

// Formats one conversion of percent_format, such as %5.2f.
std::string converted(Runtime& runtime, const std::string& spec, const Value& value) {
  const char kind = spec.back();
  std::string numeric = spec.substr(0, spec.size() - 1);
  if (numeric.size() > 8) throw TemplateError(fmt::format("expected a short format; got \"{}\"", spec));
  if (kind == 's' || kind == 'r') {
    const std::string text = kind == 's' ? runtime.str(value) : to_repr(runtime.budget(), value);
    if (numeric == "%") return text;
    throw TemplateError(fmt::format("expected %s without a width; got \"{}\", which is not supported", spec));
  }
  if (!value.is_number())
    throw TemplateError(fmt::format("%{} format: expected a number; got '{}'", kind, value.type_name()));
  if (kind == 'd' || kind == 'i') {
    if (value.is<double>() && std::abs(value.real()) >= 0x1p63) throw TemplateError("expected an integer of 64 bits");
    return fmt::sprintf(numeric + "d", value.is<double>() ? static_cast<int64_t>(value.real()) : value.integer());
  }
  if (std::string_view("xXo").find(kind) != std::string_view::npos && value.is_integer() && value.integer() >= 0)
    return fmt::sprintf(spec, value.integer());
  if (std::string_view("feEgG").find(kind) != std::string_view::npos) return fmt::sprintf(spec, value.real());
  throw TemplateError(fmt::format("expected a format of s, r, d, i, x, X, o, f, e or g; got \"{}\"", spec));
}

}  // namespace

std::string upper(std::string_view text) {
  return mapped(text, [](char32_t c, bool) { return upper_of(c); });
}

std::string lower(std::string_view text) {
  return mapped(text, [](char32_t c, bool) { return lower_of(c); });
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return "";
  size_t first = 0;
  next_char(text, &first);
  return mapped(text.substr(0, first), [](char32_t c, bool) { return title_of(c); }) + lower(text.substr(first));
}

std::string title_case(std::string_view text) {
  return mapped(text, [](char32_t c, bool after_letter) { return after_letter ? lower_of(c) : title_of(c); });
}

std::string_view strip(std::string_view text, const std::string* characters, StripSide side) {
  const auto is_stripped = [&](size_t begin, size_t end) {
    size_t at = begin;
    if (characters == nullptr) return is_python_space(next_char(text, &at));
    const std::string_view one = text.substr(begin, end - begin);
    for (size_t i = 0; i < characters->size();) {
      const size_t before = i;
      next_char(*characters, &i);
      if (std::string_view(*characters).substr(before, i - before) == one) return true;
    }
    return false;
  };
  size_t begin = 0, end = text.size();
  while (side != StripSide::right && begin < end) {
    size_t next = begin;
    next_char(text, &next);
    if (!is_stripped(begin, next)) break;
    begin = next;
  }
  while (side != StripSide::left && begin < end) {
    const size_t last = previous_char(text, end);
    if (!is_stripped(last, end)) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

// An empty `from` is found before each character and at the end.
std::string replace_all(Budget& budget, std::string_view text, std::string_view from, std::string_view to,
                        int64_t count) {
  std::string out;
  size_t at = 0;
  const auto put = [&](std::string_view part) {
    budget.make(part.size());
    out += part;
  };
  for (int64_t done = 0; count < 0 || done < count; ++done) {
    if (from.empty()) {
      put(to);
      if (at == text.size()) return out;
      const size_t begin = at;
      next_char(text, &at);
      put(text.substr(begin, at - begin));
      continue;
    }
    const auto* found = static_cast<const char*>(memmem(text.data() + at, text.size() - at, from.data(), from.size()));
    if (found == nullptr) break;
    const size_t begin = static_cast<size_t>(found - text.data());
    put(text.substr(at, begin - at));
    put(to);
    at = begin + from.size();
  }
  put(text.substr(at));
  return out;
}

std::string repeat(Budget& budget, std::string_view text, int64_t count) {
  if (count <= 0 || text.empty()) return "";
  if (count > (int64_t{1} << 40)) budget.make(SIZE_MAX >> 1);
  budget.make(text.size() * static_cast<size_t>(count));
  std::string out;
  for (int64_t i = 0; i < count; ++i) out += text;
  return out;
}

std::string percent_format(Runtime& runtime, const std::string& format, const Value& arguments) {
  const std::vector<Value> values = arguments.is_tuple() ? arguments.items() : std::vector<Value>{arguments};
  size_t next = 0;
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    const size_t end = format.find_first_not_of("0123456789.+- #", i + 1);
    if (end == std::string::npos) throw TemplateError("incomplete format");
    if (format[end] == '%') {
      out += '%';
    } else {
      if (format[end] == '(') throw TemplateError("expected formats without names; got %(...), which is not supported");
      if (next == values.size()) throw TemplateError("not enough arguments for format string");
      out += converted(runtime, format.substr(i, end + 1 - i), values[next++]);
    }
    i = end;
  }
  if (next < values.size() && (arguments.is_tuple() || !arguments.is_dict()))
    throw TemplateError("not all arguments converted during string formatting");
  return out;
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t here = at;
    const char32_t c = next_char(text, &at);
    const bool ends = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!ends) continue;
    lines.emplace_back(text.substr(begin, here - begin));
    if (c == U'\r' && at < text.size() && text[at] == '\n') ++at;
    begin = at;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

Filter find_text_filter(const std::string& name) {
  static const std::unordered_map<std::string_view, Filter> filters{
      {"upper", upper_filter}, {"lower", lower_filter}, {"capitalize", capitalize_filter},
      {"title", title_filter}, {"trim", trim},          {"replace", replace},
      {"indent", indent},      {"format", format}};
  const auto it = filters.find(name);
  return it == filters.end() ? nullptr : it->second;
}

}  // namespace moebius::jinja
