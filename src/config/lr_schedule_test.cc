#include "config/train_spec.h"

#include <gtest/gtest.h>

#include <cmath>

namespace moebius {
namespace {

OptimizerSpec with(LrSchedule schedule) { return {.lr = 0.8, .min_lr = 0.2, .warmup_steps = 4, .schedule = schedule}; }

TEST(LrAt, WarmupIsLinearAndReachesLrAtItsLastStep) {
  for (const auto schedule : {LrSchedule::constant, LrSchedule::cosine, LrSchedule::linear, LrSchedule::wsd}) {
    const OptimizerSpec o = with(schedule);
    EXPECT_DOUBLE_EQ(o.lr_at(1, 12), 0.2);
    EXPECT_DOUBLE_EQ(o.lr_at(3, 12), 0.6);
    EXPECT_EQ(o.lr_at(4, 12), 0.8);
  }
}

TEST(LrAt, WithoutWarmupTheFirstStepAlreadyDecays) {
  OptimizerSpec o = with(LrSchedule::linear);
  o.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(o.lr_at(1, 3), 0.6);
  EXPECT_EQ(o.lr_at(3, 3), 0.2);
  o.schedule = LrSchedule::constant;
  EXPECT_EQ(o.lr_at(1, 3), 0.8);
}

TEST(LrAt, Constant) { EXPECT_EQ(with(LrSchedule::constant).lr_at(12, 12), 0.8); }

TEST(LrAt, Cosine) {
  const OptimizerSpec o = with(LrSchedule::cosine);
  EXPECT_DOUBLE_EQ(o.lr_at(8, 12), 0.5);                                   // half way: the mean
  EXPECT_DOUBLE_EQ(o.lr_at(6, 12), 0.2 + 0.6 * (1 + std::sqrt(0.5)) / 2);  // a quarter: cos(pi / 4)
  EXPECT_EQ(o.lr_at(12, 12), 0.2);
}

TEST(LrAt, Linear) {
  const OptimizerSpec o = with(LrSchedule::linear);
  EXPECT_DOUBLE_EQ(o.lr_at(6, 12), 0.65);
  EXPECT_DOUBLE_EQ(o.lr_at(8, 12), 0.5);
  EXPECT_EQ(o.lr_at(12, 12), 0.2);
}

TEST(LrAt, WsdIsStableAndThenDecaysLinearly) {
  OptimizerSpec o = with(LrSchedule::wsd);
  o.decay_steps = 3;
  EXPECT_EQ(o.lr_at(5, 12), 0.8);
  EXPECT_EQ(o.lr_at(9, 12), 0.8);
  EXPECT_DOUBLE_EQ(o.lr_at(10, 12), 0.6);
  EXPECT_DOUBLE_EQ(o.lr_at(11, 12), 0.4);
  EXPECT_EQ(o.lr_at(12, 12), 0.2);
}

TEST(LrAt, WsdDecaysOverATenthByDefault) {
  const OptimizerSpec o = with(LrSchedule::wsd);
  EXPECT_EQ(o.lr_at(18, 20), 0.8);
  EXPECT_DOUBLE_EQ(o.lr_at(19, 20), 0.5);
  EXPECT_EQ(o.lr_at(20, 20), 0.2);
  EXPECT_EQ(o.lr_at(5, 6), 0.8);  // at least one step
  EXPECT_EQ(o.lr_at(6, 6), 0.2);
}

TEST(LrAt, NeverLeavesItsBoundsNorGoesBelowMinPastTheEnd) {
  for (const auto schedule : {LrSchedule::cosine, LrSchedule::linear, LrSchedule::wsd}) {
    const OptimizerSpec o = with(schedule);
    for (int64_t step = 4; step <= 31; ++step) {
      EXPECT_LE(o.lr_at(step + 1, 31), o.lr_at(step, 31)) << step;
      EXPECT_GE(o.lr_at(step, 31), 0.2) << step;
    }
    EXPECT_EQ(o.lr_at(100, 31), 0.2);
  }
}

}  // namespace
}  // namespace moebius
