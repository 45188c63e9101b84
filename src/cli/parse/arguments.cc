#include "cli/parse/arguments.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>

namespace moebius {

Argument* Argument::required() {
  option_->required();
  return this;
}

Argument* Argument::capture_default_str() {
  option_->capture_default_str();
  return this;
}

Argument* Argument::repeatable() {
  option_->take_all()->allow_extra_args(false);
  return this;
}

Argument* Argument::between(int64_t least, int64_t most) {
  option_->check(CLI::Range(least, most));
  return this;
}

Argument* Argument::delimiter(char character) {
  option_->delimiter(character);
  return this;
}

Argument* Argument::not_empty() {
  option_->check(
      [](const std::string& text) -> std::string { return text.empty() ? "expected a path; got an empty text" : ""; });
  return this;
}

Argument* Argument::needs(const Argument& other) {
  option_->needs(other.option_);
  return this;
}

Argument* Argument::excludes(const Argument& other) {
  option_->excludes(other.option_);
  return this;
}

size_t Argument::count() const { return option_->count(); }

Command* Command::add_subcommand(const std::string& name, const std::string& text) {
  return &commands_.emplace_back(app_->add_subcommand(name, text));
}

namespace {

template <typename Value>
struct Number {
  using Type = Value;
};
template <typename Value>
struct Number<std::optional<Value>> {
  using Type = Value;
};

// The library accepts 0x10 and the octal 010, and clamps values out of range. Returns why a text is not a
// plain number; empty if it is one.
template <typename Whole>
std::string problem_of_whole_number(const std::string& text) {
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') ? 1 : 0);
  const bool is_decimal = !digits.empty() && digits.find_first_not_of("0123456789") == std::string_view::npos &&
                          (digits.size() == 1 || digits[0] != '0');
  if (!is_decimal) return fmt::format("expected a whole number in decimal digits, such as 4096; got {}", text);
  Whole value = 0;
  const char* const end = text.data() + text.size();
  if (const auto [last, error] = std::from_chars(text.data(), end, value); error == std::errc() && last == end)
    return "";
  using Limits = std::numeric_limits<Whole>;
  return fmt::format("expected a whole number from {} to {}; got {}", Limits::min(), Limits::max(), text);
}

}  // namespace

template <typename Value>
Argument* Command::add_option(const std::string& names, Value& value, const std::string& text) {
  CLI::Option* option = app_->add_option(names, value, text);
  using Type = typename Number<Value>::Type;
  if constexpr (std::is_integral_v<Type>) option->check(problem_of_whole_number<Type>);
  return &arguments_.emplace_back(option);
}
template Argument* Command::add_option(const std::string&, std::string&, const std::string&);
template Argument* Command::add_option(const std::string&, int&, const std::string&);
template Argument* Command::add_option(const std::string&, int64_t&, const std::string&);
template Argument* Command::add_option(const std::string&, uint64_t&, const std::string&);
template Argument* Command::add_option(const std::string&, double&, const std::string&);
template Argument* Command::add_option(const std::string&, std::vector<std::string>&, const std::string&);
template Argument* Command::add_option(const std::string&, std::optional<int64_t>&, const std::string&);
template Argument* Command::add_option(const std::string&, std::optional<double>&, const std::string&);

Argument* Command::add_flag(const std::string& names, bool& value, const std::string& text) {
  return &arguments_.emplace_back(app_->add_flag(names, value, text));
}

void Command::require_subcommand() { app_->require_subcommand(1); }

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::callback(std::function<void()> call) { app_->callback(std::move(call)); }

size_t Command::count(const std::string& option) const { return app_->count(option); }

std::string argument_parser_version() { return CLI11_VERSION; }

}  // namespace moebius
