// The arguments of the program and of its commands. The library that parses them, CLI11, is included by
// arguments.cc and main.cc alone: its headers take longer to compile than any command.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace moebius {

// One argument of a command. If what the user typed breaks a rule, the parser throws an error, which
// main.cc prints.
class Argument {
 public:
  explicit Argument(CLI::Option* option) : option_(option) {}

  Argument* required();
  // The help of the command shows the value that the variable has now.
  Argument* capture_default_str();
  // It may be given several times, with one value each time.
  Argument* repeatable();
  Argument* between(int64_t least, int64_t most);
  // A value is a list, with this character between its items.
  Argument* delimiter(char character);
  Argument* not_empty();
  // The two may not be given together.
  Argument* excludes(const Argument& other);
  // It may only be given together with the other.
  Argument* needs(const Argument& other);
  // Number of values that the user gave.
  size_t count() const;

 private:
  CLI::Option* option_;
};

// A command, or the whole program. It owns the arguments and commands that are added to it. Pointers to them
// stay valid as long as it lives.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  Command* add_subcommand(const std::string& name, const std::string& text);
  // names: "--name" of an option, or "NAME" of an argument known by its place. What the user gives is
  // written to value when the arguments are parsed.
  template <typename Value>
  Argument* add_option(const std::string& names, Value& value, const std::string& text);
  Argument* add_flag(const std::string& names, bool& value, const std::string& text);
  // The user must name one of its commands.
  void require_subcommand();
  // The help ends with this text.
  void footer(const std::string& text);
  // Called when this command was asked for and all arguments are parsed.
  void callback(std::function<void()> call);
  // Number of values that the user gave for an option.
  size_t count(const std::string& option) const;

 private:
  CLI::App* app_;
  std::deque<Argument> arguments_;
  std::deque<Command> commands_;
};

// Version of CLI11.
std::string argument_parser_version();

}  // namespace moebius
