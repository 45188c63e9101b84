#include "config/recipe/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>

#include "core/error.h"

// On malformed input toml++ 3.3 asserts conditions that its own error paths report, or lets an
// optimising clang assume them. So its assertions are empty in every build. It reads NDEBUG, so it
// is included last.
#undef NDEBUG
#define TOML_ASSERT(condition) static_assert(true)
#include <toml++/toml.h>

namespace moebius {

using nlohmann::json;

namespace {

// No recipe needs more. The bound keeps recursion shallow on hostile input.
constexpr int kDeepest = 16;

json to_json(const toml::node& node, const std::string& where, int depth);

json table_to_json(const toml::table& table, const std::string& where, int depth) {
  json out = json::object();
  for (const auto& [key, value] : table) out[std::string(key.str())] = to_json(value, where, depth + 1);
  return out;
}

json array_to_json(const toml::array& array, const std::string& where, int depth) {
  json out = json::array();
  for (const toml::node& value : array) out.push_back(to_json(value, where, depth + 1));
  return out;
}

json to_json(const toml::node& node, const std::string& where, int depth) {
  MOEBIUS_CHECK(usage, depth <= kDeepest, "{}: values nest deeper than {}; remove brackets", where, kDeepest);
  if (const auto* table = node.as_table()) return table_to_json(*table, where, depth);
  if (const auto* array = node.as_array()) return array_to_json(*array, where, depth);
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* integer = node.as_integer()) return integer->get();
  if (const auto* number = node.as_floating_point()) return number->get();
  if (const auto* boolean = node.as_boolean()) return boolean->get();
  MOEBIUS_FAIL(usage, "{}: no key holds a date or time; write a string in quotes", where);
}

// Returns the position after the string or comment that begins at begin; begin if none does.
size_t skip_quoted(std::string_view text, size_t begin) {
  const char open = text[begin];
  if (open == '#') return std::min(text.find('\n', begin), text.size());
  if (open != '"' && open != '\'') return begin;
  const bool multiline = text.substr(begin, 3) == std::string(3, open);
  const std::string close(multiline ? 3 : 1, open);
  for (size_t i = begin + close.size(); i < text.size(); ++i) {
    if (text.substr(i, close.size()) == close) return i + close.size();
    if (text[i] == '\n' && !multiline) return i;
    if (text[i] == '\\' && open == '"') ++i;
  }
  return text.size();
}

// toml++ 3.3 has undefined behaviour on a character that is not ASCII where it looks
// for white space.
void refuse_stray_characters(std::string_view text, const std::string& name) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  for (size_t i = text.substr(0, 3) == kByteOrderMark ? 3 : 0; i < text.size();) {
    const size_t end = skip_quoted(text, i);
    MOEBIUS_CHECK(usage, end > i || static_cast<unsigned char>(text[i]) < 0x80,
                  "{}:{}: expected ASCII outside of strings and comments; got another character; quote it", name,
                  1 + std::count(text.begin(), text.begin() + i, '\n'));
    i = std::max(end, i + 1);
  }
}

toml::table parse_toml(const std::string& text, const std::string& name) {
  refuse_stray_characters(text, name);
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& e) {
    const auto at = e.source().begin;
    const bool is_yaml = name.ends_with(".yml") || name.ends_with(".yaml");
    MOEBIUS_FAIL(usage, "{}:{}:{}: not TOML: {}{}", name, at.line, at.column, e.description(),
                 is_yaml ? "; a recipe is TOML: sections such as [train], and lines such as steps = 100" : "");
  }
}

// Returns the value of a one-line TOML text; nothing if it is not TOML or is a date.
std::optional<json> parse_value(const std::string& text) {
  if (text.find('\n') != std::string::npos) return std::nullopt;
  try {
    const toml::table table = parse_toml("x = " + text, "--set");
    const toml::node& node = *table.get("x");
    if (node.is_date() || node.is_time() || node.is_date_time()) return std::nullopt;
    return to_json(node, "--set", 1);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string quoted_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string float_text(double value) {
  // The shortest text that round-trips: "1" for 1.0, which TOML reads as an integer.
  std::string text = fmt::format("{}", value);
  if (std::isfinite(value) && text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

bool bare_key(std::string_view key) {
  constexpr std::string_view kBare = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
  return !key.empty() && key.find_first_not_of(kBare) == std::string_view::npos;
}

std::string list_text(const json& list) {
  std::vector<std::string> parts;
  for (const json& value : list) parts.push_back(toml_text(value));
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

std::string table_text(const json& table) {
  std::vector<std::string> parts;
  for (const auto& [key, value] : table.items()) {
    parts.push_back(fmt::format("{} = {}", bare_key(key) ? key : quoted_text(key), toml_text(value)));
  }
  return fmt::format("{{{}}}", fmt::join(parts, ", "));
}

}  // namespace

std::vector<RecipeEntry> read_recipe(const std::string& text, const std::string& name) {
  std::vector<RecipeEntry> entries;
  const auto add = [&](std::string key, const toml::key& at, const toml::node& node) {
    std::string where = fmt::format("{}:{}", name, at.source().begin.line);
    json value = to_json(node, where, 1);
    entries.push_back({std::move(key), std::move(value), std::move(where)});
  };
  const toml::table table = parse_toml(text, name);
  for (const auto& [section, node] : table) {
    const toml::table* keys = node.as_table();
    if (!keys || keys->empty()) {
      add(std::string(section.str()), section, node);
      continue;
    }
    for (const auto& [key, value] : *keys) add(fmt::format("{}.{}", section.str(), key.str()), key, value);
  }
  return entries;
}

std::pair<std::string, std::string> split_assignment(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  std::string key = trimmed(assignment.substr(0, equals));
  MOEBIUS_CHECK(usage, equals != std::string::npos && !key.empty(),
                "--set {}: expected SECTION.KEY=VALUE, as in --set train.steps=100", assignment);
  return {std::move(key), trimmed(assignment.substr(equals + 1))};
}

RecipeEntry read_override(const std::string& assignment) {
  const auto [key, text] = split_assignment(assignment);
  if (auto value = parse_value(text)) return {key, std::move(*value), "--set"};
  const bool opened = !text.empty() && std::string_view("[{\"'").find(text[0]) != std::string_view::npos;
  // Parsing it as a quoted string fails only on bytes that are not UTF-8.
  const auto word = opened ? std::nullopt : parse_value(quoted_text(text));
  MOEBIUS_CHECK(usage, word.has_value(), "--set {}: the value is not TOML; quote strings inside lists", assignment);
  return {key, *word, "--set"};
}

std::string toml_text(const json& value) {
  if (value.is_string()) return quoted_text(value.get<std::string>());
  if (value.is_number_float()) return float_text(value.get<double>());
  if (value.is_array()) return list_text(value);
  return value.is_object() ? table_text(value) : value.dump();
}

}  // namespace moebius
