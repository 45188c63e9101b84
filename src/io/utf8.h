// UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstdint>
#include <string_view>

namespace moebius {

// Returns the offset of the first byte that begins no valid sequence; -1 when all of the
// text is valid.
int64_t find_invalid_utf8(std::string_view text);

}  // namespace moebius
