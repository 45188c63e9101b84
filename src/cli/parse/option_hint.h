// Guesses the option that a user meant by one that a command does not have.
#pragma once

#include <string>
#include <vector>

namespace moebius {

struct UnknownOption {
  std::string option;                                          // as it was typed: "--steps", or "--steps=5"
  std::string next;                                            // the argument after it; empty if it is the last
  std::vector<std::string> options;                            // those of the command, "--ranks"
  enum class Sets { none, layout, recipe } sets = Sets::none;  // the keys that --set of the command takes
};

// Returns a hint to append to an error, or an empty text:
//   "; did you mean --ranks?" if an option of the command has a similar name;
//   "; a key of the recipe is set with --set train.steps=5" for the last part of a key;
//   the key that does what an option of this name does in other software.
// VALUE stands for a value that the key would refuse.
std::string option_hint(const UnknownOption& unknown);

}  // namespace moebius
