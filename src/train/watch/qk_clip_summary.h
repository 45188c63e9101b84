// Sums up what QK-clip did in the steps of a run, for the log.
#pragma once

#include <cstdint>
#include <string>

#include "train/metrics.h"

namespace moebius {

class QkClipSummary {
 public:
  void add(const StepReport& report);  // adds a step to the summary
  // Returns a string such as "optimizer.qk_clip = 100: no head was clipped in 40 steps; the largest logit was 12.3", or
  // "...: heads were clipped in 3 of 40 steps, 17 in all; the largest logit was 131"; empty without QK-clip.
  std::string text(double threshold) const;

 private:
  int64_t steps_ = 0, clipped_steps_ = 0, clipped_heads_ = 0;
  double max_logit_ = 0;
};

}  // namespace moebius
