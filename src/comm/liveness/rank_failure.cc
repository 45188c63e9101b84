#include "comm/liveness/rank_failure.h"

#include <new>

namespace moebius {

std::optional<ErrorKind> error_kind(int number) {
  for (const ErrorKind kind : {ErrorKind::usage, ErrorKind::input, ErrorKind::io, ErrorKind::numerics,
                               ErrorKind::distributed, ErrorKind::internal})
    if (number == static_cast<int>(kind)) return kind;
  return std::nullopt;
}

RankFailure caught_failure() {
  try {
    throw;
  } catch (const Error& e) {
    return {.what = e.what(), .distributed = e.kind() == ErrorKind::distributed, .kind = e.kind()};
  } catch (const std::bad_alloc&) {
    return {.what = "out of memory; raise the memory limits of this rank (ulimit -v, those of the container)"};
  } catch (const std::exception& e) {
    return {.what = e.what()};
  } catch (...) {
    return {.what = "no std::exception"};
  }
}

std::string report_of(const RankFailure& failure, const std::string& rank, const CollectiveFlightRecorder& recorder) {
  if (failure.distributed) return failure.what;
  return fmt::format("{} threw, and others did not: {}\nlast collectives of {}:\n{}", rank, failure.what, rank,
                     recorder.text());
}

}  // namespace moebius
