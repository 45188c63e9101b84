#include <functional>

#include "bench/ranks.h"
#include "comm/group_cost.h"
#include "comm/transport/threads.h"
#include "io/testing.h"

namespace moebius {
namespace {

// 16 ranks exchange in two levels. A tensor of 64 KiB is summed in one piece.
TEST(BenchCollectives, CountsMessagesAndBytesBesideTheFormulas) {
  constexpr int kRanks = 16;
  constexpr int64_t kBytes = 64 << 10;
  std::vector<CollectiveLine> lines;
  run_threads(kRanks, {.timeout_s = 60}, [&](Transport& world) {
    const auto mine = bench_collectives(DeviceKind::cpu, world, {.sizes = {kBytes}, .budget_s = 0});
    if (world.rank() == 0) lines = mine;
  });
  const double bytes = kBytes;
  const std::vector<std::pair<std::string, GroupCost>> want = {
      {"all_gather", all_gather_cost(bytes, kRanks)},
      {"reduce_scatter_sum", reduce_scatter_cost(bytes, kRanks)},
      {"all_reduce_sum", all_reduce_cost(bytes, kRanks)},
      {"all_to_all_v", all_to_all_cost(bytes * (kRanks - 1) / kRanks, kRanks)},
  };
  ASSERT_EQ(lines.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const auto& [name, cost] = want[i];
    EXPECT_EQ(lines[i].name, name);
    EXPECT_EQ(lines[i].bytes, kBytes) << name;
    EXPECT_GT(lines[i].median_ms, 0) << name;
    EXPECT_EQ(lines[i].sent_messages, cost.messages) << name;
    EXPECT_EQ(static_cast<double>(lines[i].sent_bytes), cost.wire_bytes) << name;
    EXPECT_EQ(lines[i].formula_bytes, cost.wire_bytes) << name;
  }
}

// 1 PiB on each rank is more than any machine has.
TEST(BenchCollectives, LeavesOutSizesThatDoNotFit) {
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    const auto lines =
        bench_collectives(DeviceKind::cpu, world, {.sizes = {1 << 10, 2 << 10, int64_t{1} << 50}, .budget_s = 0});
    ASSERT_EQ(lines.size(), 2 * 4u);
    EXPECT_EQ(lines.back().bytes, 2 << 10);
  });
}

}  // namespace
}  // namespace moebius
