// What a rank of a world of processes threw, for the others and for the report.
#pragma once

#include <optional>
#include <string>

#include "comm/liveness/collective_flight_recorder.h"
#include "core/error.h"

namespace moebius {

struct RankFailure {
  std::string what;
  bool distributed = false;       // other ranks are known to be in trouble
  std::optional<ErrorKind> kind;  // of an Error
};

// The kind with that number, as an exit code or on its way between ranks; none where it is no Error's.
std::optional<ErrorKind> error_kind(int number);
// REQUIRES: within a handler.
RankFailure caught_failure();
// What `rank` says of it to the user when not all ranks have failed alike; ring: the rank's own.
std::string report_of(const RankFailure& failure, const std::string& rank, const CollectiveFlightRecorder& ring);

}  // namespace moebius
