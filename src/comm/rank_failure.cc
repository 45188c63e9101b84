#include "comm/rank_failure.h"

namespace moebius {

RankFailure caught_failure() {
  try {
    throw;
  } catch (const Error& e) {
    return {.what = e.what(), .distributed = e.kind() == ErrorKind::distributed, .kind = e.kind()};
  } catch (const std::exception& e) {
    return {.what = e.what()};
  } catch (...) {
    return {.what = "no std::exception"};
  }
}

}  // namespace moebius
