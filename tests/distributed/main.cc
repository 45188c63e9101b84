// Runs the tests over threads. If mpirun or start_ranks starts N processes, it runs the tests of N
// ranks over MPI or TCP, or those of --gtest_filter, which must be tests of N ranks.
#include <gtest/gtest.h>

#include "tests/distributed/launched.h"
#include "tests/distributed/ranks.h"

namespace {

int run_over_processes() {
  int failed = 0;
  moebius::run_launched(moebius::test_world(), [&](moebius::Transport& world) {
    moebius::process_world() = &world;
    const std::string ranks = std::to_string(world.size());
    if (GTEST_FLAG_GET(filter) == "*") GTEST_FLAG_SET(filter, "Everywhere/*/" + ranks + ":Everywhere/*_on_" + ranks);
    GTEST_FLAG_SET(catch_exceptions, false);  // a failure must end the process, so that the other ranks notice it
    if (world.rank() > 0) GTEST_FLAG_SET(brief, true);
    failed = RUN_ALL_TESTS();
  });
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return moebius::started_by_mpirun() || moebius::started_over_tcp() ? run_over_processes() : RUN_ALL_TESTS();
}
