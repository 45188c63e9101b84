#include "comm/transport/link_figures.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(LinkFigures, ARateIsTheLinksIfAMessageTookManyRoundTrips) {
  const LinkFigures fast{.round_trip_s = 2e-4, .bytes_per_s = 7e7};  // 14 KB in a round trip
  EXPECT_FALSE(is_rate_of_link(fast, 60'000));
  EXPECT_TRUE(is_rate_of_link(fast, 1'000'000));
  const LinkFigures slow{.round_trip_s = 2e-4, .bytes_per_s = 1e6};
  EXPECT_TRUE(is_rate_of_link(slow, 60'000));
  EXPECT_FALSE(is_rate_of_link(slow, 1'000)) << "a few bytes show no rate";
  const LinkFigures far{.round_trip_s = 0.1, .bytes_per_s = 140'000};
  EXPECT_FALSE(is_rate_of_link(far, 60'000)) << "five round trips";
  EXPECT_FALSE(is_rate_of_link({.bytes_per_s = 1e6}, 60'000)) << "the round trip is unknown";
  EXPECT_FALSE(is_rate_of_link({.round_trip_s = 2e-4}, 60'000)) << "the rate is unknown";
}

}  // namespace
}  // namespace moebius
