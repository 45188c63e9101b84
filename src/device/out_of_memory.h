// The error for memory that the host or a GPU did not have.
// It is a type of its own, so that code that knows the memory plan can add its table.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"

namespace moebius {

class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& what) : Error(ErrorKind::usage, what) {}
};

// Returns whether a failed library's message, or the name of its status, says that memory ran out.
bool is_out_of_memory(std::string_view words);

// Throws for a failed call of a library: OutOfMemory if is_out_of_memory(what), else Error{kind}.
// what: the call, and the library's message.
[[noreturn]] void throw_library_error(ErrorKind kind, const std::string& what);

}  // namespace moebius
