// Methods of strings, lists and dicts. Those that would change their object are refused, as by the
// sandbox of Jinja.
#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

#include "io/unicode.h"
#include "jinja/filters.h"
#include "jinja/lexer.h"

namespace moebius::jinja {
namespace {

using Method = Value (*)(Runtime&, const Value& self, const Arguments&);

// Returns whether a text begins or ends with a string, or with one of a tuple of strings.
Value begins_or_ends(const Value& self, const Arguments& arguments, bool begins) {
  const Parameters p(begins ? "startswith" : "endswith", arguments, {"prefix"});
  const std::vector<Value> options = p.at(0).is_tuple() ? p.at(0).items() : std::vector<Value>{p.at(0)};
  return std::any_of(options.begin(), options.end(), [&](const Value& option) {
    if (!option.is_text())
      throw TemplateError(fmt::format("expected a string or a tuple of strings; got '{}'", option.type_name()));
    return begins ? self.text().starts_with(option.text()) : self.text().ends_with(option.text());
  });
}
Value startswith(Runtime&, const Value& self, const Arguments& a) { return begins_or_ends(self, a, /*begins=*/true); }
Value endswith(Runtime&, const Value& self, const Arguments& a) { return begins_or_ends(self, a, /*begins=*/false); }

Value stripped(Runtime& runtime, const Value& self, const Arguments& arguments, StripSide side) {
  const Parameters p("strip", arguments, {"chars"});
  const std::string characters = p.is_none(0) ? "" : p.text(0);
  runtime.budget().step(static_cast<int64_t>(characters.size()));
  return runtime.text(std::string(jinja::strip(self.text(), p.is_none(0) ? nullptr : &characters, side)));
}
Value strip_both(Runtime& r, const Value& self, const Arguments& a) { return stripped(r, self, a, StripSide::both); }
Value lstrip(Runtime& r, const Value& self, const Arguments& a) { return stripped(r, self, a, StripSide::left); }
Value rstrip(Runtime& r, const Value& self, const Arguments& a) { return stripped(r, self, a, StripSide::right); }

// Returns the words between spaces. The rest of the text is the last part when `most` splits were made.
std::vector<std::string> words_of(std::string_view text, int64_t most, bool from_right) {
  const StripSide side = from_right ? StripSide::right : StripSide::left;
  std::vector<std::string> words;
  while (true) {
    text = strip(text, nullptr, side);
    if (text.empty()) break;
    if (most >= 0 && std::ssize(words) == most) {
      words.emplace_back(strip(text, nullptr, side));
      break;
    }
    size_t cut = from_right ? text.size() : 0;
    while (from_right ? cut > 0 : cut < text.size()) {
      size_t next = from_right ? previous_char(text, cut) : cut, at = next;
      if (is_python_space(next_char(text, &at))) break;
      cut = from_right ? next : at;
    }
    words.emplace_back(from_right ? text.substr(cut) : text.substr(0, cut));
    text = from_right ? text.substr(0, cut) : text.substr(cut);
  }
  if (from_right) std::reverse(words.begin(), words.end());
  return words;
}

std::vector<std::string> parts_of(std::string_view text, std::string_view between, int64_t most, bool from_right) {
  if (between.empty()) throw TemplateError("empty separator");
  std::vector<std::string> parts;
  while (most < 0 || std::ssize(parts) < most) {
    const size_t at = from_right ? text.rfind(between) : text.find(between);
    if (at == std::string_view::npos) break;
    parts.emplace_back(from_right ? text.substr(at + between.size()) : text.substr(0, at));
    text = from_right ? text.substr(0, at) : text.substr(at + between.size());
  }
  parts.emplace_back(text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

Value texts(Runtime& runtime, std::vector<std::string> parts) {
  std::vector<Value> values;
  for (std::string& part : parts) values.push_back(runtime.text(std::move(part)));
  return runtime.list(std::move(values));
}

// A search may compare each character of the text with the whole separator.
void charge_search(Runtime& runtime, const std::string& text, const std::string& sought) {
  runtime.budget().step(static_cast<int64_t>(text.size() / 64 + 1) * static_cast<int64_t>(sought.size() / 16 + 1));
}

Value split_with(Runtime& runtime, const Value& self, const Arguments& arguments, bool from_right) {
  const Parameters p("split", arguments, {"sep", "maxsplit"});
  const int64_t most = p.integer_or(1, -1);
  if (p.is_none(0)) return texts(runtime, words_of(self.text(), most, from_right));
  charge_search(runtime, self.text(), p.text(0));
  return texts(runtime, parts_of(self.text(), p.text(0), most, from_right));
}
Value split(Runtime& r, const Value& self, const Arguments& a) { return split_with(r, self, a, /*from_right=*/false); }
Value rsplit(Runtime& r, const Value& self, const Arguments& a) { return split_with(r, self, a, /*from_right=*/true); }

Value splitlines(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("splitlines", arguments, {"keepends"});
  if (p.truth_or(0, false))
    throw TemplateError("splitlines: expected lines without ends; got keepends, which is not supported");
  return texts(runtime, lines_of(self.text()));
}

Value partition_at(Runtime& runtime, const Value& self, const Arguments& arguments, bool from_right) {
  const Parameters p("partition", arguments, {"sep"});
  charge_search(runtime, self.text(), p.text(0));
  std::vector<std::string> parts = parts_of(self.text(), p.text(0), 1, from_right);
  if (parts.size() == 2) return Value::tuple({parts[0], p.text(0), parts[1]});
  return from_right ? Value::tuple({"", "", parts[0]}) : Value::tuple({parts[0], "", ""});
}
Value partition(Runtime& r, const Value& self, const Arguments& a) {
  return partition_at(r, self, a, /*from_right=*/false);
}
Value rpartition(Runtime& r, const Value& self, const Arguments& a) {
  return partition_at(r, self, a, /*from_right=*/true);
}

Value replace(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("replace", arguments, {"old", "new", "count"});
  return replace_all(runtime.budget(), self.text(), p.text(0), p.text(1), p.integer_or(2, -1));
}

Value join(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("join", arguments, {"iterable"});
  std::string out;
  bool first = true;
  for (const Value& item : items_of(runtime.budget(), p.at(0))) {
    if (!item.is_text()) throw TemplateError(fmt::format("join: expected strings; got '{}'", item.type_name()));
    runtime.budget().make(self.text().size() + item.text().size());
    if (!std::exchange(first, false)) out += self.text();
    out += item.text();
  }
  return out;
}

// Returns the place of a text in another, in characters; -1 if it is not there.
int64_t place_of(Runtime& runtime, const Value& self, const Arguments& arguments, bool last) {
  const Parameters p("find", arguments, {"sub"});
  charge_search(runtime, self.text(), p.text(0));
  const size_t at = last ? self.text().rfind(p.text(0)) : self.text().find(p.text(0));
  return at == std::string::npos ? -1 : count_characters(std::string_view(self.text()).substr(0, at));
}
Value find(Runtime& r, const Value& self, const Arguments& a) { return place_of(r, self, a, /*last=*/false); }
Value rfind(Runtime& r, const Value& self, const Arguments& a) { return place_of(r, self, a, /*last=*/true); }
Value index(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const int64_t at = place_of(runtime, self, arguments, /*last=*/false);
  if (at < 0) throw TemplateError("substring not found");
  return at;
}

Value count(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("count", arguments, {"sub"});
  const std::string sought = p.text(0);
  charge_search(runtime, self.text(), sought);
  if (sought.empty()) return count_characters(self.text()) + 1;
  int64_t found = 0;
  for (size_t at = self.text().find(sought); at != std::string::npos; at = self.text().find(sought, at + sought.size()))
    ++found;
  return found;
}

Value upper_method(Runtime& r, const Value& self, const Arguments&) { return r.text(upper(self.text())); }
Value lower_method(Runtime& r, const Value& self, const Arguments&) { return r.text(lower(self.text())); }
Value title_method(Runtime& r, const Value& self, const Arguments&) { return r.text(title_case(self.text())); }
Value capitalize_method(Runtime& r, const Value& self, const Arguments&) { return r.text(capitalize(self.text())); }

Value removeprefix(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const std::string part = Parameters("removeprefix", arguments, {"prefix"}).text(0);
  return self.text().starts_with(part) ? runtime.text(self.text().substr(part.size())) : self;
}
Value removesuffix(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const std::string part = Parameters("removesuffix", arguments, {"suffix"}).text(0);
  return self.text().ends_with(part) ? runtime.text(self.text().substr(0, self.text().size() - part.size())) : self;
}

template <class Is>
bool all_characters(const Value& self, const Is& is) {
  size_t at = 0;
  while (at < self.text().size())
    if (!is(next_char(self.text(), &at))) return false;
  return at > 0;
}
Value isspace(Runtime&, const Value& self, const Arguments&) { return all_characters(self, is_python_space); }
Value isdigit(Runtime&, const Value& self, const Arguments&) {
  return all_characters(self, [](char32_t c) {
    if (c >= 0x80 && is_numeric(c))
      throw TemplateError("isdigit: expected digits of ASCII; got others, which are not supported");
    return c >= U'0' && c <= U'9';
  });
}
Value isalpha(Runtime&, const Value& self, const Arguments&) {
  return all_characters(self, [](char32_t c) {
    const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
  });
}

// str.format() with {}, {0} and {name}.
Value format(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const std::string& text = self.text();
  std::string out;
  size_t next = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c == '{' || c == '}') && i + 1 < text.size() && text[i + 1] == c) {
      out += text[i++];
      continue;
    }
    if (c == '}') throw TemplateError("Single '}' encountered in format string");
    if (c != '{') {
      out += c;
      continue;
    }
    const size_t end = text.find('}', i);
    if (end == std::string::npos) throw TemplateError("expected '}' before end of string");
    const std::string field = text.substr(i + 1, end - i - 1);
    if (field.find_first_of("!:.[{") != field.npos)
      throw TemplateError(fmt::format("format: expected fields such as {{}}, {{0}} or {{name}}; got {{{}}}", field));
    const bool is_number = field.empty() || field.find_first_not_of("0123456789") == field.npos;
    const Value* found = nullptr;
    const size_t at = field.empty() ? next++ : is_number ? std::stoul(field.substr(0, 9)) : 0;
    if (is_number && at < arguments.positional.size()) found = &arguments.positional[at];
    for (const auto& [name, value] : arguments.named)
      if (!is_number && name == field) found = &value;
    if (found == nullptr) throw TemplateError(fmt::format("format: expected a value for {{{}}}; got none", field));
    out += runtime.str(*found);
    i = end;
  }
  return runtime.text(std::move(out));
}

Value get(Runtime&, const Value& self, const Arguments& arguments) {
  const Parameters p("get", arguments, {"key", "default"});
  if (p.at(0).is_list() || p.at(0).is_dict())
    throw TemplateError(fmt::format("unhashable type: '{}'", p.at(0).type_name()));
  const Value* found = self.dict().find(p.at(0));
  return found != nullptr ? *found : p.get(1, None{});
}

Value view(Runtime& runtime, std::vector<Value> items) {
  runtime.budget().make(items.size() * sizeof(Value));
  runtime.budget().step(std::ssize(items));
  return std::make_shared<Iterable>(Iterable::Kind::view, std::move(items));
}
Value items(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("items", arguments, {});
  std::vector<Value> pairs;
  for (const auto& [key, value] : self.dict().items()) pairs.push_back(Value::tuple({key, value}));
  return view(runtime, std::move(pairs));
}
Value keys(Runtime& runtime, const Value& self, const Arguments&) {
  return view(runtime, items_of(runtime.budget(), self));
}
Value values(Runtime& runtime, const Value& self, const Arguments&) {
  std::vector<Value> found;
  for (const auto& [key, value] : self.dict().items()) found.push_back(value);
  return view(runtime, std::move(found));
}
Value copy(Runtime&, const Value& self, const Arguments&) { return self; }

Value count_item(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("count", arguments, {"value"});
  return int64_t{std::count_if(self.items().begin(), self.items().end(),
                               [&](const Value& item) { return equal(runtime.budget(), item, p.at(0)); })};
}
Value index_of_item(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Parameters p("index", arguments, {"value"});
  for (size_t i = 0; i < self.items().size(); ++i)
    if (equal(runtime.budget(), self.items()[i], p.at(0))) return static_cast<int64_t>(i);
  throw TemplateError("value is not in list");
}

using Methods = std::unordered_map<std::string_view, Method>;

const Methods& text_methods() {
  static const Methods methods{{"startswith", startswith},
                               {"endswith", endswith},
                               {"strip", strip_both},
                               {"lstrip", lstrip},
                               {"rstrip", rstrip},
                               {"split", split},
                               {"rsplit", rsplit},
                               {"splitlines", splitlines},
                               {"partition", partition},
                               {"rpartition", rpartition},
                               {"replace", replace},
                               {"join", join},
                               {"find", find},
                               {"rfind", rfind},
                               {"index", index},
                               {"count", count},
                               {"upper", upper_method},
                               {"lower", lower_method},
                               {"title", title_method},
                               {"isspace", isspace},
                               {"isdigit", isdigit},
                               {"isalpha", isalpha},
                               {"format", format},
                               {"capitalize", capitalize_method},
                               {"removeprefix", removeprefix},
                               {"removesuffix", removesuffix}};
  return methods;
}

const Methods& dict_methods() {
  static const Methods methods{{"get", get}, {"items", items}, {"keys", keys}, {"values", values}, {"copy", copy}};
  return methods;
}

const Methods& list_methods() {
  static const Methods methods{{"count", count_item}, {"index", index_of_item}, {"copy", copy}};
  return methods;
}

// Methods of Python that templates cannot call: they change their object, or are not supported.
bool is_refused(const Value& object, const std::string& name) {
  constexpr auto kText = std::to_array<std::string_view>(
      {"casefold",  "center",       "encode",  "expandtabs", "format_map",  "isalnum",   "isascii",
       "isdecimal", "isidentifier", "islower", "isnumeric",  "isprintable", "istitle",   "isupper",
       "ljust",     "maketrans",    "rindex",  "rjust",      "swapcase",    "translate", "zfill"});
  constexpr auto kDict =
      std::to_array<std::string_view>({"clear", "fromkeys", "pop", "popitem", "setdefault", "update"});
  constexpr auto kList =
      std::to_array<std::string_view>({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"});
  const auto has = [&](const auto& names) { return std::find(names.begin(), names.end(), name) != names.end(); };
  return object.is_text() ? has(kText) : object.is_dict() ? has(kDict) : object.is_list() && has(kList);
}

}  // namespace

bool method_of(const Value& object, const std::string& name, Value* method) {
  const Methods* methods = object.is_text()                        ? &text_methods()
                           : object.is_dict()                      ? &dict_methods()
                           : object.is_list() || object.is_tuple() ? &list_methods()
                                                                   : nullptr;
  if (methods == nullptr) return false;
  const auto it = methods->find(name);
  const bool is_copy_of_tuple = object.is_tuple() && name == "copy";
  if (it == methods->end() || is_copy_of_tuple) {
    if (!is_refused(object, name)) return false;
    *method = std::make_shared<Function>(name, [name](Runtime&, const Arguments&) -> Value {
      throw TemplateError(fmt::format("expected no method {}; it changes its object, or is not supported", name));
    });
    return true;
  }
  if (object.is_safe_text())
    throw TemplateError("expected no method of a text after the filter safe; that is not supported");
  const Method body = it->second;
  *method = std::make_shared<Function>(
      name,
      [object, body](Runtime& runtime, const Arguments& arguments) {
        if (object.is_text()) runtime.budget().read_text(object.text().size() * 16);
        if (object.is_list() || object.is_tuple()) runtime.budget().step(std::ssize(object.items()));
        return body(runtime, object, arguments);
      },
      object.depth() + 1);
  return true;
}

}  // namespace moebius::jinja
