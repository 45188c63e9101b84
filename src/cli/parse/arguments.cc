#include "cli/parse/arguments.h"

#include <CLI/CLI.hpp>

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

template <typename Value>
Argument* Command::add_option(const std::string& names, Value& value, const std::string& text) {
  return &arguments_.emplace_back(app_->add_option(names, value, text));
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
