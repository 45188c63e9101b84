#include "comm/liveness/call_watchdog.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/liveness/stall_aware_deadline.h"

namespace moebius {
namespace {

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

TEST(CallWatchdog, DoesNotFireIfTheCallReturnsInTime) {
  std::atomic<int> late = 0;
  const Deadline end = deadline_in(10);
  for (int i = 0; i < 10; ++i) const CallWatchdog watchdog(20, [&] { ++late; });
  EXPECT_EQ(late, 0);
  EXPECT_GT(milliseconds_until(end), 0) << "it does not wait for its time limit";
}

TEST(CallWatchdog, ACallThatDoesNotReturnIsReportedOnceInTime) {
  std::atomic<int> late = 0;
  const CallWatchdog watchdog(0.1, [&] { ++late; });
  for (const Deadline end = deadline_in(20); late == 0 && milliseconds_until(end) > 0;) sleep_ms(1);
  sleep_ms(300);
  EXPECT_EQ(late, 1);
}

TEST(StallAwareDeadline, EndsAfterItsTime) {
  StallAwareDeadline deadline(0.3);
  EXPECT_FALSE(deadline.is_over());
  const Deadline end = deadline_in(20);
  while (!deadline.is_over() && milliseconds_until(end) > 0) sleep_ms(deadline.milliseconds_to_sleep());
  EXPECT_GT(milliseconds_until(end), 0);
  EXPECT_TRUE(deadline.is_over());
  EXPECT_TRUE(StallAwareDeadline(0).is_over());
}

// The sleep below looks like a process that is stopped and continued.
TEST(StallAwareDeadline, TimeStoppedDoesNotCount) {
  StallAwareDeadline deadline(0.3);
  sleep_ms(static_cast<int>(StallAwareDeadline::kStoppedGapS * 1000) + 500);
  EXPECT_FALSE(deadline.is_over());
}

}  // namespace
}  // namespace moebius
