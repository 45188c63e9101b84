// How a file begins that a clone without Git LFS leaves in the place of a large one.
#pragma once

#include <string_view>

namespace moebius {

inline constexpr std::string_view kLfsPointer = "version https://git-lfs";

}  // namespace moebius
