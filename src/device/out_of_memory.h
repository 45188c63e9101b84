// Memory that the host or a GPU did not have. An error of its own, so that who knows the memory plan adds its table.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"

namespace moebius {

class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& what) : Error(ErrorKind::usage, what) {}
};

// Whether a library that failed says, in words or by the name of a status, that it was memory.
bool tells_of_memory(std::string_view words);
// A library's call failed. what: the call, and the library's words. OutOfMemory
// where they tell of it, else Error{kind}.
[[noreturn]] void throw_library_error(ErrorKind kind, const std::string& what);

}  // namespace moebius
