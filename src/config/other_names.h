// Names that other software has for what a recipe says.
#pragma once

#include <string>
#include <string_view>

namespace moebius {

// "; that is optimizer.lr here" for the last part of a key (learning_rate) that means one of ours, or
// nothing.
std::string other_name_hint(std::string_view key);

}  // namespace moebius
