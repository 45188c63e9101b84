// The names that other software has for keys of a recipe.
#pragma once

#include <string>
#include <string_view>

namespace moebius {

// Returns "; here that is optimizer.lr", if the key or its last part (learning_rate) is another name of one
// of our keys; else empty. Hyphens count as underscores.
std::string other_name_hint(std::string_view key);

}  // namespace moebius
