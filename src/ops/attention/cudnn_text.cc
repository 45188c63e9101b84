#include <fmt/format.h>

#include "ops/attention/attention_scratch.h"

namespace moebius {

std::string planned_cudnn_text() {
  return has_cudnn()
             ? "this plan assumes cuDNN 9.19 for attention: where cuDNN computes the call, a bound of its workspace is counted"
             : "this plan assumes no cuDNN for attention: this build lacks 9.19, the only version that Moebius uses";
}

std::string planned_cudnn_text(const GpuKernels& on) {
  return on.are_portable() ? "this plan assumes no cuDNN for attention: run.kernels is \"portable\""
                           : planned_cudnn_text();
}

std::string cudnn_text(int64_t version) {
  if (version == 0) return "not part of this build";
  return fmt::format("{}.{}.{}{}", version / 10000, version / 100 % 100, version % 100,
                     is_measured_cudnn(version) ? "" : " (not used: attention uses only 9.19)");
}

}  // namespace moebius
