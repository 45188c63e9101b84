// Memory that the host or a GPU did not have. An error of its own, so that who knows the memory plan adds its table.
#pragma once

#include <string>

#include "core/error.h"

namespace moebius {

class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const std::string& what) : Error(ErrorKind::usage, what) {}
};

}  // namespace moebius
