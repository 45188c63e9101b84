#include "bench/announce.h"

#include <gtest/gtest.h>

#include "io/testing.h"

namespace moebius {
namespace {

// The bench itself compares the index with plain loops.
TEST(BenchAnnounce, TimesEveryOp) {
  for (const int64_t ranks : {1, 2, 8}) {
    const AnnounceBench r = bench_announce(
        {.scale = 1.0 / 16, .sequences = 3, .ranks = ranks, .routing = {.kind = BenchRouting::Kind::zipf}, .runs = 1});
    EXPECT_EQ(r.shape.T(), 3 * 32);
    ASSERT_FALSE(r.lines.empty());
    EXPECT_EQ(r.lines[0].name, "announce");
    for (const AnnounceLine& line : r.lines) EXPECT_GT(line.us, 0) << line.name;
  }
}

TEST(BenchAnnounce, RanksMustDivideTheExperts) {
  expect_error(ErrorKind::usage, "bench announce: --ranks must divide the 16 experts of bench-cpu; got 3",
               [] { bench_announce({.scale = 1.0 / 16, .ranks = 3}); });
}

}  // namespace
}  // namespace moebius
