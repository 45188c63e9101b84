#include <fmt/format.h>

#include "ops/attention/attention_cudnn.h"

namespace moebius {

std::string cudnn_text(int64_t version) {
  if (version == 0) return "not part of this build";
  return fmt::format("{}.{}.{}{}", version / 10000, version / 100 % 100, version % 100,
                     is_measured_cudnn(version) ? "" : " (not used: attention takes 9.19 alone)");
}

}  // namespace moebius
