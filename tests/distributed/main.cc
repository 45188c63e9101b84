// Runs the tests over threads; started by mpirun with N processes, those of N ranks over MPI.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/distributed/ranks.h"

namespace {

bool started_by_mpirun() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

int run_over_mpi() {
  int failed = 0;
  const moebius::MpiOptions options{.world = moebius::test_world(), .report = [](const std::string& text) {
                                      std::fprintf(stderr, "%s\n", text.c_str());
                                    }};
  moebius::run_mpi(options, [&](moebius::Transport& world) {
    moebius::mpi_world() = &world;
    const std::string ranks = std::to_string(world.size());
    GTEST_FLAG_SET(filter, "Everywhere/*/" + ranks + ":Everywhere/*_on_" + ranks);
    GTEST_FLAG_SET(catch_exceptions, false);  // the others are told
    if (world.rank() > 0) GTEST_FLAG_SET(brief, true);
    failed = RUN_ALL_TESTS();
  });
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return started_by_mpirun() ? run_over_mpi() : RUN_ALL_TESTS();
}
