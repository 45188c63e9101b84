#include "train/slow_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace moebius {
namespace {

LinkMeasurement link(int peer, double round_trip_s, double bytes_per_s = 0, bool is_filled = false) {
  return {.peer = peer,
          .crosses_machines = true,
          .round_trip_s = round_trip_s,
          .bytes_per_s = bytes_per_s,
          .is_filled = is_filled};
}

SlowLinks slowest(const std::vector<std::vector<LinkMeasurement>>& of_ranks) {
  std::vector<LinkRow> rows;
  for (const auto& links : of_ranks) rows.push_back(link_row(links));
  SlowLinks slow = slowest_links(rows);
  name_hosts(slow, {"a", "b", "c"});
  return slow;
}

// Three machines; only the link between ranks 1 and 2 is slow.
TEST(SlowLinks, NameTheLinkOfALongRoundTrip) {
  const SlowLinks slow =
      slowest({{link(1, 2e-4), link(2, 3e-4)}, {link(0, 2e-4), link(2, 0.1)}, {link(0, 3e-4), link(1, 0.1)}});
  EXPECT_TRUE(is_slow_round_trip(slow.round_trip));
  EXPECT_FALSE(slow.rate.is_known());
  EXPECT_EQ(to_json(slow).dump(),
            R"({"round_trip_s":{"ranks":[1,2],"hosts":["b","c"],"value":0.1,"median_of_others":0.0002,"slow":true}})");
  EXPECT_EQ(slow_links_text(slow, /*only_slow=*/true),
            "rank 1 (b) to rank 2 (c) has a round trip of 100 ms, the median of the others is 0.2 ms");
}

// The rates of the others are bounds from below, since they had nothing more to send.
TEST(SlowLinks, NameTheLinkOfALowRate) {
  const SlowLinks slow = slowest({{link(1, 2e-4, 2e8), link(2, 2e-4, 2e8)},
                                  {link(0, 2e-4, 2e8), link(2, 2e-4, 1048576, true)},
                                  {link(0, 2e-4, 2e8), link(1, 2e-4, 2e7)}});
  EXPECT_FALSE(is_slow_round_trip(slow.round_trip));
  EXPECT_TRUE(is_slow_rate(slow.rate));
  EXPECT_EQ(slow_links_text(slow, true),
            "rank 1 (b) to rank 2 (c) has a rate of 1.0 MiB/s, the median of the others is 190.7 MiB/s");
}

TEST(SlowLinks, LinksThatAreAlikeAreNotSlow) {
  const SlowLinks slow = slowest({{link(1, 2e-4, 2e8, true), link(2, 4e-4, 1e8, true)},
                                  {link(0, 2e-4, 2e8, true), link(2, 3e-4, 2e8, true)},
                                  {link(0, 4e-4, 1e8, true), link(1, 3e-4, 2e8, true)}});
  EXPECT_EQ(slow.round_trip.value, 4e-4);
  EXPECT_EQ(slow.rate.value, 1e8);
  EXPECT_EQ(slow_links_text(slow, true), "");
  EXPECT_NE(slow_links_text(slow), "");
}

// A network of microseconds: twenty times more is still fast.
TEST(SlowLinks, AShortRoundTripIsNotSlow) {
  EXPECT_EQ(slow_links_text(slowest({{link(1, 2e-5), link(2, 2e-5)}, {link(0, 2e-5), link(2, 4e-4)}, {}}), true), "");
}

// Two ranks have nothing to compare their connection with; threads and MPI have none.
TEST(SlowLinks, WithoutOthersNothingIsSlow) {
  const SlowLinks two = slowest({{link(1, 0.1)}, {link(0, 0.1)}});
  EXPECT_EQ(slow_links_text(two), "rank 0 (a) to rank 1 (b) has a round trip of 100 ms");
  EXPECT_EQ(slow_links_text(two, true), "");
  EXPECT_TRUE(to_json(slowest({{}, {}, {}})).is_null());
  EXPECT_EQ(slow_links_text(slowest({{}, {}, {}})), "");
}

// Connections inside a machine are always faster, and are not compared with connections between machines.
TEST(SlowLinks, LinksBetweenMachinesAreComparedWithEachOther) {
  LinkMeasurement inside = link(1, 2e-5);
  inside.crosses_machines = false;
  const SlowLinks slow = slowest({{inside, link(2, 2e-3)}, {link(2, 2e-3)}, {link(0, 2e-3), link(1, 2e-3)}});
  EXPECT_EQ(slow.round_trip.median_of_others, 2e-3);
  EXPECT_EQ(slow_links_text(slow, true), "");
}

}  // namespace
}  // namespace moebius
