// Numbers of parameters and tokens in short form.
#pragma once

#include <cstdint>
#include <string>

namespace moebius {

std::string count_text(int64_t count);  // "30.53 B", "0.16 M"; the number itself below 10000

}  // namespace moebius
