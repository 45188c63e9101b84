#include "jinja/filters.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <unordered_map>

#include "jinja/lexer.h"

namespace moebius::jinja {
namespace {

constexpr auto kOtherFilters = std::to_array<std::string_view>(
    {"e", "escape", "filesizeformat", "forceescape", "pprint", "random", "striptags", "truncate", "urlencode", "urlize",
     "wordwrap", "xmlattr", "center", "slice", "attr", "wordcount"});

// Returns the number that Python's int() or float() reads from a text; nothing if it reads none.
std::optional<double> real_of(std::string_view text) {
  const std::string_view digits = strip(text, nullptr);
  double value = 0;
  const size_t sign = digits.starts_with('+') ? 1 : 0;
  const auto [end, error] = std::from_chars(digits.data() + sign, digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

Value to_integer(Runtime&, const Value& input, const Arguments& arguments) {
  const Parameters p("int", arguments, {"default", "base"});
  if (p.integer_or(1, 10) != 10) throw TemplateError("int: expected base 10; got another, which is not supported");
  const Value otherwise = p.get(0, int64_t{0});
  if (input.is_undefined()) throw TemplateError(input.why_undefined());
  if (input.is_integer()) return input.integer();
  std::optional<double> real;
  if (input.is<double>()) real = input.real();
  if (input.is_text()) {
    const std::string_view digits = strip(input.text(), nullptr);
    const size_t sign = digits.starts_with('+') ? 1 : 0;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data() + sign, digits.data() + digits.size(), value);
    if (error == std::errc{} && end == digits.data() + digits.size()) return value;
    real = real_of(input.text());
  }
  if (!real || !std::isfinite(*real)) return otherwise;
  if (std::abs(*real) >= 0x1p63) throw TemplateError("int: expected an integer of 64 bits; got a larger one");
  return static_cast<int64_t>(*real);
}

Value to_real(Runtime&, const Value& input, const Arguments& arguments) {
  const Parameters p("float", arguments, {"default"});
  if (input.is_undefined()) throw TemplateError(input.why_undefined());
  if (input.is_number()) return input.real();
  const std::optional<double> real = input.is_text() ? real_of(input.text()) : std::nullopt;
  return real ? Value(*real) : p.get(0, 0.0);
}

Value to_string(Runtime& runtime, const Value& input, const Arguments&) {
  return input.is_text() ? input : runtime.text(runtime.str(input));
}

Value or_default(Runtime&, const Value& input, const Arguments& arguments) {
  const Parameters p("default", arguments, {"default_value", "boolean"});
  const bool is_missing = input.is_undefined() || (p.truth_or(1, false) && !truth(input));
  return is_missing ? p.get(0, "") : input;
}

Value length(Runtime& runtime, const Value& input, const Arguments&) { return length_of(runtime.budget(), input); }

Value absolute(Runtime&, const Value& input, const Arguments&) {
  if (input.is<double>()) return std::abs(input.real());
  if (!input.is_integer()) throw TemplateError(fmt::format("abs: expected a number; got '{}'", input.type_name()));
  if (input.integer() == INT64_MIN) throw TemplateError("abs: expected an integer of 64 bits; got a larger one");
  return std::abs(input.integer());
}

// Ties are rounded to the even digit of the decimal text, as in Python.
Value rounded(Runtime&, const Value& input, const Arguments& arguments) {
  const Parameters p("round", arguments, {"precision", "method"});
  const int64_t digits = p.integer_or(0, 0);
  const std::string method = p.text_or(1, "common");
  if (!input.is_number()) throw TemplateError(fmt::format("round: expected a number; got '{}'", input.type_name()));
  if (digits < 0 || digits > 15) throw TemplateError(fmt::format("round: expected 0 to 15 digits; got {}", digits));
  if (method == "common") {
    if (input.is_integer()) return input.integer();
    return std::stod(fmt::format("{:.{}f}", input.real(), digits));
  }
  const double scale = std::pow(10.0, static_cast<double>(digits)), scaled = input.real() * scale;
  if (method != "ceil" && method != "floor") throw TemplateError("round: expected common, ceil or floor");
  return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale;
}

Value safe(Runtime& runtime, const Value& input, const Arguments&) {
  return input.is_safe_text() ? input : Value::safe_text(runtime.str(input));
}

const std::unordered_map<std::string_view, Filter>& plain_filters() {
  static const std::unordered_map<std::string_view, Filter> filters{
      {"int", to_integer}, {"float", to_real}, {"string", to_string}, {"default", or_default},
      {"d", or_default},   {"length", length}, {"count", length},     {"abs", absolute},
      {"round", rounded},  {"tojson", tojson}, {"safe", safe}};
  return filters;
}

// --- tests ---

template <class T>
bool holds(Runtime&, const Value& value, const Arguments&) {
  return value.is<T>();
}

const Value& operand(const char* test, const Arguments& arguments) {
  if (arguments.positional.size() != 1 || !arguments.named.empty())
    throw TemplateError(fmt::format("test {}: expected one argument; got {}", test, arguments.positional.size()));
  return arguments.positional[0];
}

bool is_iterable(Runtime&, const Value& v, const Arguments&) {
  return v.is_text() || v.is_list() || v.is_tuple() || v.is_dict() || v.is_undefined() ||
         dynamic_cast<Iterable*>(v.object()) != nullptr;
}

// Returns true for values with a length and items by number.
bool is_sequence(Runtime&, const Value& v, const Arguments&) {
  const auto* iterable = dynamic_cast<const Iterable*>(v.object());
  return v.is_text() || v.is_list() || v.is_tuple() || v.is_dict() || v.is_undefined() ||
         (iterable != nullptr && iterable->kind() == Iterable::Kind::range);
}

// Returns value % by for a test, with the sign of `by` as in Python.
double remainder_of(const char* test, const Value& value, const Value& by) {
  for (const Value* each : {&value, &by})
    if (!each->is_number())
      throw TemplateError(fmt::format("test {}: expected a number; got '{}'", test, each->type_name()));
  if (value.is_integer() && by.is_integer()) {
    const int64_t divisor = by.integer();
    if (divisor == 0) throw TemplateError("division by zero");
    const int64_t left = divisor == -1 ? 0 : value.integer() % divisor;
    return static_cast<double>(left != 0 && (left < 0) != (divisor < 0) ? left + divisor : left);
  }
  const auto real = [](const Value& v) { return v.is<double>() ? v.real() : static_cast<double>(v.integer()); };
  const double divisor = real(by);
  if (divisor == 0) throw TemplateError("division by zero");
  const double left = std::fmod(real(value), divisor);
  return left != 0 && (left < 0) != (divisor < 0) ? left + divisor : left;
}

const std::unordered_map<std::string_view, Test>& tests() {
  using V = const Value&;
  using A = const Arguments&;
  static const std::unordered_map<std::string_view, Test> tests{
      {"defined", [](Runtime&, V v, A) { return !v.is_undefined(); }},
      {"undefined", holds<Undefined>},
      {"none", holds<None>},
      {"boolean", holds<bool>},
      {"true", [](Runtime&, V v, A) { return v.is<bool>() && v.boolean(); }},
      {"false", [](Runtime&, V v, A) { return v.is<bool>() && !v.boolean(); }},
      {"integer", holds<int64_t>},
      {"float", holds<double>},
      {"number", [](Runtime&, V v, A) { return v.is_number(); }},
      {"string", [](Runtime&, V v, A) { return v.is_text(); }},
      {"mapping", [](Runtime&, V v, A) { return v.is_dict(); }},
      {"iterable", is_iterable},
      {"sequence", is_sequence},
      {"callable", [](Runtime&, V v, A) { return v.object() != nullptr && v.object()->is_callable(); }},
      {"escaped", [](Runtime&, V v, A) { return v.is_safe_text(); }},
      {"lower", [](Runtime& r, V v, A) { return lower(r.str(v)) == r.str(v) && upper(r.str(v)) != r.str(v); }},
      {"upper", [](Runtime& r, V v, A) { return upper(r.str(v)) == r.str(v) && lower(r.str(v)) != r.str(v); }},
      {"odd", [](Runtime&, V v, A) { return remainder_of("odd", v, int64_t{2}) == 1; }},
      {"even", [](Runtime&, V v, A) { return remainder_of("even", v, int64_t{2}) == 0; }},
      {"divisibleby",
       [](Runtime&, V v, A a) { return remainder_of("divisibleby", v, operand("divisibleby", a)) == 0; }},
      {"sameas", [](Runtime&, V v, A a) { return v.is_same_object(operand("sameas", a)); }},
      {"in", [](Runtime& r, V v, A a) { return contains(r.budget(), operand("in", a), v); }},
      {"eq", [](Runtime& r, V v, A a) { return equal(r.budget(), v, operand("eq", a)); }},
      {"ne", [](Runtime& r, V v, A a) { return !equal(r.budget(), v, operand("ne", a)); }},
      {"lt", [](Runtime& r, V v, A a) { return compare(r.budget(), v, operand("lt", a)) < 0; }},
      {"le", [](Runtime& r, V v, A a) { return compare(r.budget(), v, operand("le", a)) <= 0; }},
      {"gt", [](Runtime& r, V v, A a) { return compare(r.budget(), v, operand("gt", a)) > 0; }},
      {"ge", [](Runtime& r, V v, A a) { return compare(r.budget(), v, operand("ge", a)) >= 0; }},
      {"filter", [](Runtime& r, V v, A) { return find_filter(r.str(v)) != nullptr; }},
      {"test", [](Runtime& r, V v, A) { return find_test(r.str(v)) != nullptr; }},
  };
  return tests;
}

// Returns the canonical name of a test.
std::string_view known_as(std::string_view name) {
  static const std::unordered_map<std::string_view, std::string_view> names{
      {"equalto", "eq"}, {"==", "eq"}, {"!=", "ne"},          {"<", "lt"}, {"lessthan", "lt"},
      {"<=", "le"},      {">", "gt"},  {"greaterthan", "gt"}, {">=", "ge"}};
  const auto it = names.find(name);
  return it == names.end() ? name : it->second;
}

}  // namespace

Filter find_filter(const std::string& name) {
  const auto it = plain_filters().find(name);
  if (it != plain_filters().end()) return it->second;
  const Filter text = find_text_filter(name);
  return text != nullptr ? text : find_list_filter(name);
}

Test find_test(const std::string& name) {
  const auto it = tests().find(known_as(name));
  return it == tests().end() ? nullptr : it->second;
}

void check_filter_name(const std::string& name) {
  if (find_filter(name) != nullptr) return;
  if (std::find(kOtherFilters.begin(), kOtherFilters.end(), name) != kOtherFilters.end())
    throw TemplateError(fmt::format("expected a filter of chat templates; got \"{}\", which is not supported", name));
}

void check_test_name(const std::string& name) {
  if (find_test(name) == nullptr) throw TemplateError(fmt::format("expected a known test; got \"{}\"", name));
}

}  // namespace moebius::jinja
