// A failure of a rank in a world of processes: what it threw, for the other ranks and
// for the report.
#pragma once

#include <optional>
#include <string>

#include "comm/liveness/collective_flight_recorder.h"
#include "core/error.h"

namespace moebius {

struct RankFailure {
  std::string what;
  bool distributed = false;       // other ranks are known to have failed
  std::optional<ErrorKind> kind;  // set when it was an Error
};

// Returns the kind with that number, which is an exit code or came from another rank;
// nothing for other numbers.
std::optional<ErrorKind> error_kind(int number);
// Returns the exception that is being handled. REQUIRES: within a handler.
RankFailure caught_failure();
// Returns the report to the user when the ranks have not all failed in the same way. `recorder` is
// that of `rank`.
std::string report_of(const RankFailure& failure, const std::string& rank, const CollectiveFlightRecorder& recorder);

}  // namespace moebius
