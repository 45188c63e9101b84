#include <fmt/format.h>

#include "ops/attention/attention_cudnn.h"

namespace moebius {

std::string planned_cudnn_text() {
  return has_cudnn() ? "attention has cuDNN 9.19: its workspace is counted, by a bound, where it takes the shape"
                     : "attention has no cuDNN: this build lacks 9.19, the version that was measured";
}

std::string cudnn_text(int64_t version) {
  if (version == 0) return "not part of this build";
  return fmt::format("{}.{}.{}{}", version / 10000, version / 100 % 100, version % 100,
                     is_measured_cudnn(version) ? "" : " (not used: attention takes 9.19 alone)");
}

}  // namespace moebius
