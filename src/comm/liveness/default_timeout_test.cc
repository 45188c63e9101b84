#include "comm/liveness/default_timeout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <optional>
#include <thread>

#include "comm/control.h"
#include "comm/transport/tcp_testing.h"
#include "comm/transport/threads.h"
#include "core/error.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(DefaultTimeout, IsAMinuteBeyondTheLongestStep) {
  DefaultTimeout timeout;
  EXPECT_EQ(timeout.seconds({}), 600);
  timeout.step_done(2.5);
  EXPECT_EQ(timeout.seconds({}), 62.5);
  timeout.step_done(0.25);
  EXPECT_EQ(timeout.seconds({}), 62.5);
  timeout.step_done(7.01);
  EXPECT_EQ(timeout.seconds({}), 67.1) << "rounded up to tenths";
  timeout.step_done(700);
  EXPECT_EQ(timeout.seconds({}), 760);
}

TEST(DefaultTimeout, IsLongBetweenSteps) {
  DefaultTimeout timeout;
  timeout.step_done(1);
  {
    const auto outer = timeout.between_steps();
    { const auto inner = timeout.between_steps(); }
    EXPECT_EQ(timeout.seconds({}), 600);
    timeout.step_done(700);
    EXPECT_EQ(timeout.seconds({}), 760);
  }
  EXPECT_EQ(timeout.seconds({}), 760);
  DefaultTimeout other;
  other.step_done(1);
  { const auto between = other.between_steps(); }
  EXPECT_EQ(other.seconds({}), 61);
}

// Small figures, so that a test can wait for them.
WorldOptions world(std::optional<double> timeout_s = {}) {
  return {.timeout_s = timeout_s, .default_timeout = {.before_steps_s = 30, .beyond_step_s = 0.5}};
}

// Rank 0 waits for rank 1, which comes after `late_s`, with work between steps or without.
// Returns the error of the run.
struct Late {
  double late_s = 0;
  bool is_between_steps = false;
};
RankBody body(const Late& late) {
  return [late](Transport& transport) {
    transport.default_timeout().step_done(0.2);
    Control control(transport);
    std::optional<DefaultTimeout::BetweenSteps> between;
    if (late.is_between_steps) between.emplace(transport.default_timeout());
    if (transport.rank() == 1) std::this_thread::sleep_for(std::chrono::duration<double>(late.late_s));
    control.barrier();
  };
}

std::string error_over_threads(const WorldOptions& options, const Late& late) {
  try {
    run_threads(2, options, body(late));
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::string error_over_tcp(const WorldOptions& options, const Late& late) {
  const Ends ends = run_world(2, body(late), [&](TcpOptions& o) { o.world = options; });
  return ends.reports[0];
}

TEST(DefaultTimeout, EndsAWaitOfATransport) {
  for (const auto& error_over : {error_over_threads, error_over_tcp}) {
    EXPECT_THAT(error_over(world(), {.late_s = 3}), HasSubstr("rank 0 has waited for 0.7 s; did not join: rank 1"));
    EXPECT_EQ(error_over(world(), {.late_s = 1.2, .is_between_steps = true}), "");
  }
}

TEST(DefaultTimeout, GivesWayToATimeoutThatIsSet) {
  for (const auto& error_over : {error_over_threads, error_over_tcp}) {
    EXPECT_THAT(error_over(world(1.5), {.late_s = 3}), HasSubstr("rank 0 has waited for 1.5 s; did not join: rank 1"));
    EXPECT_EQ(error_over(world(20), {.late_s = 1.2}), "");
  }
}

}  // namespace
}  // namespace moebius
