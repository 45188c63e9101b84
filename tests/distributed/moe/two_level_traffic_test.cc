// Ranks of pretended nodes send what the formulas say with the two-level dispatcher, across nodes and inside them, over
// every transport.
#include "model/moe/dispatchers/two_level_testing.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

class TwoLevelTraffic : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, TwoLevelTraffic, ::testing::Values(4, 6, 8), name_of_ranks);

TEST_P(TwoLevelTraffic, EqualsTheFormulas) {
  run([](Transport& world) {
    const int64_t n = world.size();
    for (const MeshShape& mesh : {MeshShape{.dp = n, .ep = n, .ranks_per_node = 2},
                                  {.dp = n, .etp = 2, .ep = n / 2, .ranks_per_node = 2},
                                  {.dp = n, .ep = n, .ranks_per_node = 1}}) {
      testing::expect_two_level_traffic({.mesh = mesh,
                                         .dispatcher = DispatcherKind::two_level,
                                         .T = 19,
                                         .E = 24,
                                         .K = 3,
                                         .D = 10,
                                         .drops = true,
                                         .dtype = DType::bf16},
                                        world);
    }
  });
}

}  // namespace
}  // namespace moebius
