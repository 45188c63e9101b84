#include "comm/liveness/bounded_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "comm/transport/threads.h"
#include "core/error.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

WorldOptions options(double timeout_s) {
  return {.timeout_s = timeout_s, .coordinates = [](int r) { return fmt::format("dp {}", r); }};
}

// A call that ends only when the test ends.
struct Endless {
  std::shared_ptr<std::atomic<bool>> over = std::make_shared<std::atomic<bool>>(false);
  ~Endless() { *over = true; }
  std::function<void()> body() const {
    return [over = over] {
      while (!*over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
  }
};

std::string failure_of(int num_ranks, double timeout_s, const RankBody& body) {
  try {
    run_threads(num_ranks, options(timeout_s), body);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(BoundedCall, EndsWithItsBody) {
  int calls = 0;
  run_threads(1, options(60),
              [&](Transport& world) { call_bounded(world, {.what = "a call", .with = {}, .body = [&] { ++calls; }}); });
  EXPECT_EQ(calls, 1);
  const std::string said = failure_of(1, 60, [](Transport& world) {
    call_bounded(world, {.what = "a call", .with = {}, .body = [] { MOEBIUS_FAIL(io, "the library says no"); }});
  });
  EXPECT_THAT(said, HasSubstr("the library says no"));
}

TEST(BoundedCall, NamesTheAwaitedRanks) {
  const Endless endless;
  const std::string said = failure_of(3, 0.05, [&](Transport& world) {
    if (world.rank() == 1)
      call_bounded(world, {.what = "making a communicator", .with = {0, 2}, .body = endless.body()});
  });
  EXPECT_THAT(said, AllOf(HasSubstr("making a communicator: rank 1 (dp 1) has waited for 0.05 s for rank 0 (dp 0), "
                                    "rank 2 (dp 2), one of which has not joined"),
                          HasSubstr("last collectives that rank 1 (dp 1) was in:\n  none")));
}

// The error comes long before the timeout.
TEST(BoundedCall, EndsWhenAnotherRankFails) {
  const Endless endless;
  std::atomic<bool> has_ended = false;
  const std::string said = failure_of(2, 600, [&](Transport& world) {
    if (world.rank() == 1) MOEBIUS_FAIL(numerics, "the loss is not a number");
    try {
      call_bounded(world, {.what = "making a communicator", .with = {1}, .body = endless.body()});
    } catch (const Error& e) {
      has_ended = true;
      EXPECT_EQ(e.kind(), ErrorKind::distributed);
      throw;
    }
  });
  EXPECT_TRUE(has_ended);
  EXPECT_THAT(said, AllOf(HasSubstr("the loss is not a number"), Not(HasSubstr("has waited"))));
}

}  // namespace
}  // namespace moebius
