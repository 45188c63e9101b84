#include "cli/launch.h"

#include <map>

#include "io/testing.h"

namespace moebius {
namespace {

Environment of(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
}

TEST(Launch, AloneUnlessALauncherSaysOtherwise) {
  for (const auto& one : {of({}), of({{"OMPI_COMM_WORLD_SIZE", "1"}}), of({{"WORLD_SIZE", "1"}, {"RANK", "0"}}),
                          of({{"PMI_SIZE", ""}}), of({{"SLURM_NTASKS", "8"}})}) {
    EXPECT_EQ(detect_launch(one).kind, Launch::Kind::alone);
    EXPECT_EQ(detect_launch(one).num_ranks, 1);
  }
}

TEST(Launch, MpirunAndSrun) {
  const Launch open_mpi = detect_launch(of({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "3"}}));
  EXPECT_EQ(open_mpi.kind, Launch::Kind::mpi);
  EXPECT_EQ(open_mpi.num_ranks, 4);
  EXPECT_EQ(open_mpi.rank, 3);
  EXPECT_EQ(open_mpi.evidence, "OMPI_COMM_WORLD_SIZE=4");
  EXPECT_EQ(detect_launch(of({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}})).rank, 1);
  const Launch slurm = detect_launch(of({{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_PROCID", "5"}, {"PMIX_RANK", "5"}}));
  EXPECT_EQ(slurm.num_ranks, 8);
  EXPECT_EQ(slurm.rank, 5);
}

// The daemons of mpirun are a Slurm step of one task a node; what they start is not.
TEST(Launch, MpirunInsideASlurmJobIsMpirun) {
  const Launch launch = detect_launch(of({{"SLURM_STEP_NUM_TASKS", "2"},
                                          {"SLURM_PROCID", "0"},
                                          {"OMPI_COMM_WORLD_SIZE", "16"},
                                          {"OMPI_COMM_WORLD_RANK", "9"}}));
  EXPECT_EQ(launch.num_ranks, 16);
  EXPECT_EQ(launch.rank, 9);
}

TEST(Launch, NeverTheSameRunSeveralTimes) {
  expect_error(ErrorKind::usage, "WORLD_SIZE=2 says that several processes were started, but no MPI launcher did", [] {
    detect_launch(of({{"WORLD_SIZE", "2"}, {"RANK", "1"}}));
  });
  EXPECT_EQ(launcher_rank(of({{"WORLD_SIZE", "2"}, {"RANK", "1"}})), 0);  // its error must be seen
}

TEST(Launch, NumbersThatAreNone) {
  expect_error(ErrorKind::usage, "OMPI_COMM_WORLD_SIZE must be a whole number; got \"two\"", [] {
    detect_launch(of({{"OMPI_COMM_WORLD_SIZE", "two"}}));
  });
  expect_error(ErrorKind::usage, "PMI_RANK=2 must be below PMI_SIZE=2", [] {
    detect_launch(of({{"PMI_SIZE", "2"}, {"PMI_RANK", "2"}}));
  });
}

TEST(Launch, ThreadsAreForOneProcess) {
  const Launch launch = launch_threads(3, {});
  EXPECT_EQ(launch.kind, Launch::Kind::threads);
  EXPECT_EQ(launch.num_ranks, 3);
  EXPECT_EQ(launch_threads(1, {}).kind, Launch::Kind::alone);
  expect_error(ErrorKind::usage, "--ranks: expected at least 1; got 0", [] { launch_threads(0, {}); });
  expect_error(ErrorKind::usage, "--ranks: expected at most 1024; got 1025", [] { launch_threads(1025, {}); });
  expect_error(ErrorKind::usage, "got several processes from a launcher (PMI_SIZE=2); leave --ranks out", [] {
    launch_threads(2, detect_launch(of({{"PMI_SIZE", "2"}})));
  });
}

}  // namespace
}  // namespace moebius
