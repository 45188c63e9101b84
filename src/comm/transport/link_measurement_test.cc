#include "comm/transport/link_measurement.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

// A message of 60 KB over a link with round trips of 0.2 ms.
TEST(LinkMeasurement, OnlyMessagesOfManyRoundTripsGiveARate) {
  constexpr double kTrip = 2e-4;
  EXPECT_FALSE(is_rate_of_link(kTrip, 45'000, 3 * kTrip)) << "it took few: the link may be faster";
  EXPECT_TRUE(is_rate_of_link(kTrip, 45'000, 0.045));
  EXPECT_FALSE(is_rate_of_link(kTrip, 1'000, 0.1)) << "a few bytes show no rate";
  EXPECT_FALSE(is_rate_of_link(0, 45'000, 0.045)) << "the round trip is unknown";
}

}  // namespace
}  // namespace moebius
