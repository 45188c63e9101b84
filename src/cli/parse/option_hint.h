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

// Returns "; did you mean --ranks?" for a typing error (of --set lora.rank=2 too, if that is a key), "; a key of the recipe is set with --set train.steps=5" for the
// last part of a key, or what other software calls the key; else empty. A value that the key would not take is shown
// as VALUE.
std::string option_hint(const UnknownOption& unknown);

}  // namespace moebius
