#include "config/parallel_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(ParallelSpec, BothViewsOfTheSameRanks) {
  const ParallelSpec p{.tp = 2, .cp = 3, .pp = 2, .ep = 6, .etp = 1};
  EXPECT_NO_THROW(p.check(24));
  EXPECT_EQ(p.dp(24), 2);
  EXPECT_EQ(p.edp(24), 2);
  EXPECT_NO_THROW(ParallelSpec{}.check(1));
}

TEST(ParallelSpec, RefusesWorldsThatDoNotHoldTheLayout) {
  const auto text = [](const ParallelSpec& p, int64_t world) {
    return error_text(ErrorKind::usage, [&] { p.check(world); });
  };
  EXPECT_THAT(text({.tp = 2, .cp = 3, .pp = 2}, 18),
              HasSubstr("the number of ranks must be divisible by tp * cp * pp = 2 * 3 * 2; got 18;"));
  EXPECT_THAT(text({.pp = 2, .ep = 4, .etp = 2}, 24),
              HasSubstr("the number of ranks must be divisible by etp * ep * pp = 2 * 4 * 2; got 24;"));
  EXPECT_THAT(text({.tp = 0}, 1), HasSubstr("parallel.tp must be from 1 to 2147483647; got 0"));
  EXPECT_THAT(text({.vpp = 2}, 1), HasSubstr("parallel.vpp = 2 splits the stages of a pipeline; got pp = 1"));
  EXPECT_THAT(text({.fsdp_shard = 1}, 2), HasSubstr("parallel.fsdp_shard: expected at least 2 ranks, or 0"));
  EXPECT_THAT(text({}, 0), HasSubstr("the number of ranks must be at least 1; got 0"));
  EXPECT_THAT(text({.tp = INT32_MAX, .cp = INT32_MAX, .pp = INT32_MAX}, 8),
              HasSubstr("must be divisible by tp * cp * pp"));
}

TEST(ParallelSpec, DpOfAnotherWorldIsAnError) {
  EXPECT_THAT(error_text(ErrorKind::usage, [] { ParallelSpec{.tp = 2}.dp(3); }),
              HasSubstr("parallel: dp: 3 must be divisible by 2"));
}

}  // namespace
}  // namespace moebius
