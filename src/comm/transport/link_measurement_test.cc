#include "comm/transport/link_measurement.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

// A message of 60 KB over a link with round trips of 0.2 ms.
TEST(LinkMeasurement, ARateIsTheLinksIfAMessageTookManyRoundTrips) {
  constexpr double kTrip = 2e-4;
  EXPECT_FALSE(is_rate_of_link(kTrip, 45'000, 3 * kTrip, 60'000)) << "it took few: the link may be faster";
  EXPECT_TRUE(is_rate_of_link(kTrip, 45'000, 0.045, 60'000));
  EXPECT_TRUE(is_rate_of_link(kTrip, 450'000, 0.45, 60'000)) << "ten such messages";
  EXPECT_FALSE(is_rate_of_link(kTrip, 450'000, 100 * kTrip, 60'000)) << "many messages, and each took few";
  EXPECT_FALSE(is_rate_of_link(kTrip, 1'000, 0.1, 60'000)) << "a few bytes show no rate";
  EXPECT_FALSE(is_rate_of_link(0, 45'000, 0.045, 60'000)) << "the round trip is unknown";
}

}  // namespace
}  // namespace moebius
