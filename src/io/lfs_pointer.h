// The first bytes of a Git LFS pointer.
// A clone without Git LFS has such a small file in place of each large one.
#pragma once

#include <string_view>

namespace moebius {

inline constexpr std::string_view kLfsPointer = "version https://git-lfs";

}  // namespace moebius
