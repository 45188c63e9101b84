// What a rank of a world of processes threw, for the others and for the report.
#pragma once

#include <optional>
#include <string>

#include "core/error.h"

namespace moebius {

struct RankFailure {
  std::string what;
  bool distributed = false;       // other ranks are known to be in trouble
  std::optional<ErrorKind> kind;  // of an Error
};

// REQUIRES: within a handler.
RankFailure caught_failure();

}  // namespace moebius
