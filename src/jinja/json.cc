#include "jinja/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/unicode.h"
#include "jinja/filters.h"

namespace moebius::jinja {
namespace {

void write_unit(uint32_t unit, std::string* out) { *out += fmt::format("\\u{:04x}", unit); }

std::string quoted(std::string_view text, bool ascii) {
  std::string out = "\"";
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, &at);
    if (c == U'"' || c == U'\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == U'\n') {
      out += "\\n";
    } else if (c == U'\r') {
      out += "\\r";
    } else if (c == U'\t') {
      out += "\\t";
    } else if (c == U'\b') {
      out += "\\b";
    } else if (c == U'\f') {
      out += "\\f";
    } else if (c < 0x20 || (ascii && c > 0x7E && c <= 0xFFFF)) {
      write_unit(c, &out);
    } else if (ascii && c > 0xFFFF) {
      write_unit(0xD800 + ((c - 0x10000) >> 10), &out);
      write_unit(0xDC00 + ((c - 0x10000) & 0x3FF), &out);
    } else {
      out += text.substr(begin, at - begin);
    }
  }
  return out + '"';
}

// json.dumps of Python.
class Writer {
 public:
  struct Style {
    bool ascii = false, sort_keys = false, has_indent = false;
    std::string indent, item_separator = ", ", key_separator = ": ";
  };
  Writer(Runtime& runtime, Style style) : runtime_(runtime), style_(std::move(style)) {}

  std::string write(const Value& value, int depth = 0) {
    runtime_.budget().step();
    if (value.is_none()) return "null";
    if (value.is<bool>()) return value.boolean() ? "true" : "false";
    if (value.is_integer()) return std::to_string(value.integer());
    if (value.is<double>()) return real(value.real());
    if (value.is_text()) {
      runtime_.budget().make(value.text().size());
      runtime_.budget().step(static_cast<int64_t>(value.text().size() / 16));
      return quoted(value.text(), style_.ascii);
    }
    if (value.is_list() || value.is_tuple()) return list(value.items(), depth);
    if (value.is_dict()) return dict(value.dict(), depth);
    throw TemplateError(fmt::format("Object of type {} is not JSON serializable", value.type_name()));
  }

 private:
  static std::string real(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return real_repr(value);
  }
  std::string line(int depth) {
    if (!style_.has_indent) return "";
    return "\n" + repeat(runtime_.budget(), style_.indent, depth);
  }
  std::string list(const std::vector<Value>& items, int depth) {
    if (items.empty()) return "[]";
    std::string out = "[";
    for (const Value& item : items) {
      if (out.size() > 1) out += style_.item_separator;
      out += line(depth + 1) + write(item, depth + 1);
    }
    runtime_.budget().make(out.size());
    return out + line(depth) + "]";
  }
  std::string dict(const Dict& dict, int depth) {
    if (dict.items().empty()) return "{}";
    std::vector<Dict::Item> items = dict.items();
    if (style_.sort_keys)
      std::sort(items.begin(), items.end(),
                [&](const auto& a, const auto& b) { return compare(runtime_.budget(), a.first, b.first) < 0; });
    std::string out = "{";
    for (const auto& [key, value] : items) {
      if (out.size() > 1) out += style_.item_separator;
      out += line(depth + 1) + key_text(key) + style_.key_separator + write(value, depth + 1);
    }
    runtime_.budget().make(out.size());
    return out + line(depth) + "}";
  }
  std::string key_text(const Value& key) {
    if (key.is_text()) return quoted(key.text(), style_.ascii);
    if (!key.is_number() && !key.is_none())
      throw TemplateError(fmt::format("keys must be str, int, float, bool or None, not {}", key.type_name()));
    return '"' + write(key) + '"';
  }

  Runtime& runtime_;
  Style style_;
};

}  // namespace

Value value_of(const nlohmann::ordered_json& json) {
  if (json.is_null()) return None{};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX)
    MOEBIUS_FAIL(input, "template: expected integers of 64 bits; got {}; write it as a string", json.dump());
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get_ref<const std::string&>();
  if (json.is_array()) {
    std::vector<Value> items;
    for (const auto& item : json) items.push_back(value_of(item));
    return Value::list(std::move(items));
  }
  auto dict = std::make_shared<Dict>();
  for (const auto& [key, value] : json.items()) dict->set(key, value_of(value));
  return DictPtr(dict);
}

Value tojson(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Parameters p("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  Writer::Style style;
  style.ascii = p.truth_or(0, false);
  style.sort_keys = p.truth_or(3, false);
  style.has_indent = !p.is_none(1);
  if (style.has_indent) {
    style.item_separator = ",";
    style.indent = p.at(1).is_text() ? p.text(1) : repeat(runtime.budget(), " ", p.integer(1));
  }
  if (!p.is_none(2)) {
    const std::vector<Value> separators = items_of(runtime.budget(), p.at(2));
    if (separators.size() != 2) throw TemplateError("tojson: expected two separators");
    style.item_separator = runtime.str(separators[0]);
    style.key_separator = runtime.str(separators[1]);
  }
  return runtime.text(Writer(runtime, std::move(style)).write(input));
}

}  // namespace moebius::jinja
