#include "cli/count_text.h"

#include <fmt/format.h>

namespace moebius {

std::string count_text(int64_t count) {
  if (count < 10'000) return fmt::format("{}", count);
  const bool billions = count >= 1'000'000'000;
  const double scaled = static_cast<double>(count) / (billions ? 1e9 : 1e6);
  return fmt::format("{:.{}f} {}", scaled, scaled < 100 ? 2 : 1, billions ? "B" : "M");
}

}  // namespace moebius
