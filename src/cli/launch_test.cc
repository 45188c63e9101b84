#include "cli/launch.h"

#include <fstream>
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

TEST(Launch, SingleRankWithoutALauncher) {
  for (const auto& one : {of({}), of({{"OMPI_COMM_WORLD_SIZE", "1"}}), of({{"WORLD_SIZE", "1"}, {"RANK", "0"}}),
                          of({{"PMI_SIZE", ""}}), of({{"SLURM_NTASKS", "8"}})}) {
    EXPECT_EQ(detect_launch(one).kind, Launch::Kind::single);
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

// The daemons of mpirun are a Slurm step of one task per node; the processes that they start are not.
TEST(Launch, MpirunInsideASlurmJobIsMpirun) {
  const Launch launch = detect_launch(of({{"SLURM_STEP_NUM_TASKS", "2"},
                                          {"SLURM_PROCID", "0"},
                                          {"OMPI_COMM_WORLD_SIZE", "16"},
                                          {"OMPI_COMM_WORLD_RANK", "9"}}));
  EXPECT_EQ(launch.num_ranks, 16);
  EXPECT_EQ(launch.rank, 9);
}

const std::map<std::string, std::string> kByHand{{"WORLD_SIZE", "4"},      {"RANK", "3"},
                                                 {"LOCAL_RANK", "1"},      {"MASTER_ADDR", "n0"},
                                                 {"MASTER_PORT", "29500"}, {"MOEBIUS_HOST", "n1"}};
std::map<std::string, std::string> with(std::map<std::string, std::string> more,
                                        std::map<std::string, std::string> variables = kByHand) {
  more.merge(variables);
  return more;
}

TEST(Launch, RanksOverTcp) {
  const Launch by_hand = detect_launch(of(kByHand));
  EXPECT_EQ(by_hand.kind, Launch::Kind::tcp);
  EXPECT_EQ(by_hand.num_ranks, 4);
  EXPECT_EQ(by_hand.rank, 3);
  EXPECT_EQ(by_hand.local_rank, 1);
  EXPECT_EQ(by_hand.master_addr, "n0");
  EXPECT_EQ(by_hand.master_port, 29500);
  EXPECT_EQ(by_hand.host, "n1");
  EXPECT_FALSE(by_hand.has_store);
  EXPECT_EQ(by_hand.evidence, "WORLD_SIZE=4, rank 0 at n0:29500");
  const Launch torchrun = detect_launch(of(with({{"TORCHELASTIC_RUN_ID", "job"},
                                                 {"TORCHELASTIC_RESTART_COUNT", "2"},
                                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                 {"OMPI_COMM_WORLD_SIZE", "2"}})));
  EXPECT_EQ(torchrun.kind, Launch::Kind::tcp);
  EXPECT_TRUE(torchrun.has_store);
  EXPECT_EQ(torchrun.run, "job/2");
}

TEST(Launch, ReadsTheJobSecretFromVariableOrFile) {
  const TestDir dir;
  std::ofstream(dir.path("secret")) << "a secret of twenty..\n";
  EXPECT_EQ(detect_launch(of(kByHand)).secret, "");
  EXPECT_EQ(detect_launch(of(with({{"MOEBIUS_SECRET", "0123456789abcdef"}}))).secret, "0123456789abcdef");
  EXPECT_EQ(detect_launch(of(with({{"MOEBIUS_SECRET_FILE", dir.path("secret")}}))).secret, "a secret of twenty..");
  expect_error(
      ErrorKind::usage,
      "launch: MOEBIUS_SECRET must be a secret of at least 16 characters that is hard to guess; got 5; openssl rand "
      "-hex 32",
      [] {
        detect_launch(of(with({{"MOEBIUS_SECRET", "short"}})));
      });
  std::ofstream(dir.path("empty")) << "\n";
  expect_error(ErrorKind::usage,
               "launch: the file of MOEBIUS_SECRET_FILE must be a secret of at least 16 characters that is "
               "hard to guess; got 0",
               [&] {
                 detect_launch(of(with({{"MOEBIUS_SECRET_FILE", dir.path("empty")}})));
               });
  expect_error(ErrorKind::usage, "launch: MOEBIUS_SECRET_FILE: open " + dir.path("none") + ": No such file", [&] {
    detect_launch(of(with({{"MOEBIUS_SECRET_FILE", dir.path("none")}})));
  });
  expect_error(ErrorKind::usage, "launch: MOEBIUS_SECRET and MOEBIUS_SECRET_FILE are both set; unset one of them", [&] {
    detect_launch(of(with({{"MOEBIUS_SECRET", "0123456789abcdef"}, {"MOEBIUS_SECRET_FILE", dir.path("secret")}})));
  });
}

// MASTER_ADDR and similar variables are often exported for all; mpirun's own variables take precedence.
TEST(Launch, TheInnermostLauncherCounts) {
  EXPECT_EQ(detect_launch(of(with({{"OMPI_COMM_WORLD_SIZE", "4"}}))).kind, Launch::Kind::mpi);
  EXPECT_EQ(detect_launch(of(with({{"SLURM_STEP_NUM_TASKS", "2"}}))).kind, Launch::Kind::tcp);
  const Launch slurm = detect_launch(of({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "1"}, {"WORLD_SIZE", "9"}}));
  EXPECT_EQ(slurm.kind, Launch::Kind::mpi);
  EXPECT_EQ(slurm.num_ranks, 2);
  EXPECT_EQ(slurm.local_rank, 1);
}

TEST(Launch, IncompleteLauncherVariablesAreRefused) {
  expect_error(ErrorKind::usage, "WORLD_SIZE=2 says that several processes were started, and MASTER_ADDR is not set",
               [] {
                 detect_launch(of({{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_PORT", "29500"}}));
               });
  expect_error(ErrorKind::usage, "and RANK is not set", [] {
    detect_launch(of({{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n0"}, {"MASTER_PORT", "29500"}}));
  });
  for (const char* port : {"0", "65536"})
    expect_error(ErrorKind::usage, fmt::format("MASTER_PORT must be a port, 1 to 65535; got {}", port), [&] {
      detect_launch(of(with({{"MASTER_PORT", port}})));
    });
  EXPECT_EQ(launcher_rank(of({{"WORLD_SIZE", "2"}, {"RANK", "1"}})), 0);  // its error must be seen
}

// Several copies of `tokenize` would print a text each, of `export` write the same files.
TEST(Launch, SingleProcessCommandsRefuseSeveralProcesses) {
  EXPECT_NO_THROW(check_single_process("tokenize", detect_launch(of({{"OMPI_COMM_WORLD_SIZE", "1"}}))));
  expect_error(
      ErrorKind::usage,
      "moebius tokenize is one process; got several from a launcher (OMPI_COMM_WORLD_SIZE=2); start it without "
      "the launcher, or unset what it set",
      [] {
        check_single_process("tokenize", detect_launch(of({{"OMPI_COMM_WORLD_SIZE", "2"}})));
      });
  expect_error(ErrorKind::usage, "(SLURM_STEP_NUM_TASKS=4)", [] {
    check_single_process("export", detect_launch(of({{"SLURM_STEP_NUM_TASKS", "4"}})));
  });
  try {
    check_single_process("export", detect_launch(of({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}})));
    ADD_FAILURE() << "expected an error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "");  // the first rank reports it
  }
}

TEST(Launch, InvalidNumbers) {
  expect_error(ErrorKind::usage, "OMPI_COMM_WORLD_SIZE must be a whole number; got \"two\"", [] {
    detect_launch(of({{"OMPI_COMM_WORLD_SIZE", "two"}}));
  });
  expect_error(ErrorKind::usage, "PMI_RANK=2 must be below PMI_SIZE=2", [] {
    detect_launch(of({{"PMI_SIZE", "2"}, {"PMI_RANK", "2"}}));
  });
}

TEST(Launch, ThreadRanksNeedASingleProcess) {
  const Launch launch = launch_threads(3, {});
  EXPECT_EQ(launch.kind, Launch::Kind::threads);
  EXPECT_EQ(launch.num_ranks, 3);
  EXPECT_EQ(launch_threads(1, {}).kind, Launch::Kind::single);
  expect_error(ErrorKind::usage, "--ranks: expected at least 1; got 0", [] { launch_threads(0, {}); });
  expect_error(ErrorKind::usage, "--ranks: expected at most 1024; got 1025", [] { launch_threads(1025, {}); });
  expect_error(ErrorKind::usage, "got several processes from a launcher (PMI_SIZE=2); leave --ranks out", [] {
    launch_threads(2, detect_launch(of({{"PMI_SIZE", "2"}})));
  });
}

}  // namespace
}  // namespace moebius
