#include "train/watch/qk_clip_summary.h"

#include <algorithm>

namespace moebius {

void QkClipSummary::add(const StepReport& report) {
  if (!report.qk_clip) return;
  ++steps_;
  clipped_steps_ += report.qk_clip->clipped_heads > 0;
  clipped_heads_ += report.qk_clip->clipped_heads;
  max_logit_ = std::max(max_logit_, report.qk_clip->max_logit);
}

std::string QkClipSummary::text(double threshold) const {
  if (steps_ == 0) return "";
  const std::string clipped = clipped_steps_ == 0 ? fmt::format("no head was clipped in {} steps", steps_)
                                                  : fmt::format("heads were clipped in {} of {} steps, {} in all",
                                                                clipped_steps_, steps_, clipped_heads_);
  return fmt::format("optimizer.qk_clip = {}: {}; the largest logit was {:.3g}", threshold, clipped, max_logit_);
}

}  // namespace moebius
