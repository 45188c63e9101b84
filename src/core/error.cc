#include "core/error.h"

namespace moebius {

void fail_assert(const char* condition, const char* file, int line) {
  throw Error(ErrorKind::internal,
              fmt::format("internal error: {} does not hold [{}:{}]; please report it", condition, file, line));
}

int64_t div_exact(int64_t a, int64_t b, const char* what) {
  MOEBIUS_CHECK(usage, b > 0 && a % b == 0, "{}: {} must be divisible by {}", what, a, b);
  return a / b;
}

std::string counted(int64_t n, std::string_view noun) { return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s"); }

}  // namespace moebius
