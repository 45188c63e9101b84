#include "cli/launch.h"

#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "comm/transport/job_secret.h"
#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

// The variables in which a launcher gives the number of processes and the number of this one.
struct LauncherVariables {
  const char *size, *rank, *local_rank;
};
constexpr LauncherVariables kOpenMpi{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"};
// MPICH and launchers like it; srun with PMI-1, PMI-2.
constexpr LauncherVariables kPmi{"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"};
constexpr LauncherVariables kSlurm{"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"};  // whichever PMI it uses
constexpr LauncherVariables kByTcp{"WORLD_SIZE", "RANK", "LOCAL_RANK"};
constexpr const char *kMasterAddr = "MASTER_ADDR", *kMasterPort = "MASTER_PORT";

std::optional<int> number(const Environment& environment, const char* name) {
  const char* text = environment(name);
  if (text == nullptr || *text == 0) return std::nullopt;
  int value = -1;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  MOEBIUS_CHECK(
      usage, error == std::errc() && *end == 0 && value >= 0,
      "launch: {} must be a whole number; got \"{}\"; unset it, or start this program with mpirun or torchrun", name,
      text);
  return value;
}

std::optional<Launch> launch_by(const Environment& environment, const LauncherVariables& names) {
  const std::optional<int> size = number(environment, names.size);
  if (!size || *size <= 1) return std::nullopt;
  const int rank = number(environment, names.rank).value_or(0);
  MOEBIUS_CHECK(usage, rank < *size, "launch: {}={} must be below {}={}; unset both, or start this program with mpirun",
                names.rank, rank, names.size, *size);
  return Launch{.kind = Launch::Kind::mpi,
                .num_ranks = *size,
                .rank = rank,
                .local_rank = number(environment, names.local_rank).value_or(0),
                .evidence = fmt::format("{}={}", names.size, *size)};
}

std::string text_of(const Environment& environment, const char* name) {
  const char* text = environment(name);
  return text == nullptr ? "" : text;
}

bool is_set(const Environment& environment, const char* name) { return !text_of(environment, name).empty(); }

// Returns whether the four variables are set by which ranks find each other over TCP.
bool has_address_of_rank_0(const Environment& environment) {
  return is_set(environment, kByTcp.rank) && is_set(environment, kMasterAddr) && is_set(environment, kMasterPort);
}

std::string secret_in_file(const char* variable, const std::string& path) {
  try {
    return read_file(path);
  } catch (const Error& e) {
    MOEBIUS_FAIL(usage, "launch: {}: {}", variable, e.what());
  }
}

// A file may end with a newline.
std::string secret_of(const Environment& environment) {
  constexpr const char *kText = "MOEBIUS_SECRET", *kFile = "MOEBIUS_SECRET_FILE";
  std::string secret = text_of(environment, kText);
  MOEBIUS_CHECK(usage, secret.empty() || !is_set(environment, kFile),
                "launch: {} and {} are both set; unset one of them", kText, kFile);
  if (is_set(environment, kFile)) secret = secret_in_file(kFile, text_of(environment, kFile));
  while (!secret.empty() && std::isspace(static_cast<unsigned char>(secret.back()))) secret.pop_back();
  const bool is_given = is_set(environment, kText) || is_set(environment, kFile);
  MOEBIUS_CHECK(
      usage, !is_given || std::ssize(secret) >= kShortestSecret,
      "launch: {} must be a secret of at least {} characters that is hard to guess; got {}; openssl rand -hex 32 "
      "prints one",
      is_set(environment, kFile) ? "the file of MOEBIUS_SECRET_FILE" : kText, kShortestSecret, secret.size());
  return secret;
}

std::optional<Launch> launch_by_tcp(const Environment& environment) {
  std::optional<Launch> launch = launch_by(environment, kByTcp);
  if (!launch) return std::nullopt;
  for (const char* name : {kByTcp.rank, kMasterAddr, kMasterPort})
    MOEBIUS_CHECK(usage, is_set(environment, name),
                  "launch: {} says that several processes were started, and {} is not set; torchrun sets both, mpirun "
                  "and srun need neither; unset {} to train on one rank",
                  launch->evidence, name, kByTcp.size);
  launch->kind = Launch::Kind::tcp;
  launch->master_addr = text_of(environment, kMasterAddr);
  launch->master_port = *number(environment, kMasterPort);
  MOEBIUS_CHECK(usage, launch->master_port >= 1 && launch->master_port <= 65535,
                "launch: {} must be a port, 1 to 65535; got {}", kMasterPort, launch->master_port);
  launch->evidence += fmt::format(", rank 0 at {}:{}", launch->master_addr, launch->master_port);
  launch->host = text_of(environment, "MOEBIUS_HOST");
  launch->secret = secret_of(environment);
  launch->run = text_of(environment, "TORCHELASTIC_RUN_ID") + "/" + text_of(environment, "TORCHELASTIC_RESTART_COUNT");
  launch->has_store = text_of(environment, "TORCHELASTIC_USE_AGENT_STORE") == "True";
  return launch;
}

}  // namespace

Environment process_environment() {
  return [](const char* name) { return std::getenv(name); };
}

Launch detect_launch(const Environment& environment) {
  // The innermost launcher takes precedence: torchrun may run in a step of srun, whose variables its processes
  // inherit, and mpirun inside a Slurm job starts its daemons with srun.
  if (is_set(environment, "TORCHELASTIC_RUN_ID"))
    if (const auto launch = launch_by_tcp(environment)) return *launch;
  for (const LauncherVariables& names : {kOpenMpi, kPmi})
    if (const auto launch = launch_by(environment, names)) return *launch;
  if (!has_address_of_rank_0(environment))
    if (const auto launch = launch_by(environment, kSlurm)) return *launch;
  if (const auto launch = launch_by_tcp(environment)) return *launch;
  if (const auto launch = launch_by(environment, kSlurm)) return *launch;
  return {};
}

int launcher_rank(const Environment& environment) {
  try {
    return detect_launch(environment).rank;
  } catch (const Error&) {
    return 0;
  }
}

void check_single_process(const std::string& command, const Launch& launch) {
  if (launch.kind == Launch::Kind::single) return;
  const std::string text = fmt::format(
      "moebius {} is one process; got several from a launcher ({}); "
      "start it without the launcher, or unset what it set",
      command, launch.evidence);
  throw Error(ErrorKind::usage, launch.rank == 0 ? text : "");
}

Launch launch_threads(int64_t num_ranks, const Launch& detected) {
  MOEBIUS_CHECK(usage, num_ranks >= 1, "--ranks: expected at least 1; got {}", num_ranks);
  MOEBIUS_CHECK(usage, detected.kind == Launch::Kind::single,
                "--ranks {} makes the ranks threads of one process; "
                "got several processes from a launcher ({}); leave --ranks out",
                num_ranks, detected.evidence);
  if (num_ranks == 1) return {};
  MOEBIUS_CHECK(usage, num_ranks <= 1024, "--ranks: expected at most 1024; got {}", num_ranks);
  return {.kind = Launch::Kind::threads, .num_ranks = static_cast<int>(num_ranks)};
}

}  // namespace moebius
