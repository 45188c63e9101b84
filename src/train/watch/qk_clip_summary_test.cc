#include "train/watch/qk_clip_summary.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

StepReport step(int64_t clipped_heads, double max_logit) {
  StepReport report;
  report.qk_clip = {.clipped_heads = clipped_heads, .max_logit = max_logit};
  return report;
}

TEST(QkClipSummary, ReportsThatNothingWasClipped) {
  QkClipSummary summary;
  EXPECT_EQ(summary.text(100), "") << "before the first step";
  summary.add(StepReport{});
  EXPECT_EQ(summary.text(100), "") << "without QK-clip";
  for (const double logit : {3.0, 12.34, 7.0}) summary.add(step(0, logit));
  EXPECT_EQ(summary.text(100), "optimizer.qk_clip = 100: no head was clipped in 3 steps; the largest logit was 12.3");
}

TEST(QkClipSummary, CountsStepsAndHeads) {
  QkClipSummary summary;
  summary.add(step(0, 50));
  summary.add(step(2, 131));
  summary.add(step(3, 104));
  EXPECT_EQ(summary.text(99.5),
            "optimizer.qk_clip = 99.5: heads were clipped in 2 of 3 steps, 5 in all; the largest logit was 131");
}

}  // namespace
}  // namespace moebius
