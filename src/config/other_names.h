// The names that other software has for keys of a recipe.
#pragma once

#include <string>
#include <string_view>

namespace moebius {

// "; that is optimizer.lr here", if the last part of the key (learning_rate) is another name of one of our
// keys; else empty.
std::string other_name_hint(std::string_view key);

}  // namespace moebius
