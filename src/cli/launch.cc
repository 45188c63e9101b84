#include "cli/launch.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/error.h"

namespace moebius {
namespace {

// Where a launcher says how many processes it started and which of them this is. The first one found counts: mpirun
// inside a Slurm job starts its daemons with srun.
struct LauncherVariables {
  const char *size, *rank;
};
constexpr LauncherVariables kMpiLaunchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},  // Open MPI
    {"PMI_SIZE", "PMI_RANK"},                          // MPICH and its kin; srun with PMI-1 and PMI-2
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},          // srun, whichever way MPI finds the others
};
constexpr LauncherVariables kTorchrun{"WORLD_SIZE", "RANK"};

std::optional<int> number(const Environment& environment, const char* name) {
  const char* text = environment(name);
  if (text == nullptr || *text == 0) return std::nullopt;
  int value = -1;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  MOEBIUS_CHECK(usage, error == std::errc() && *end == 0 && value >= 0,
                "launch: {} must be a whole number; got \"{}\"; unset it, or start this program with mpirun", name,
                text);
  return value;
}

std::optional<Launch> launch_by(const Environment& environment, const LauncherVariables& names) {
  const std::optional<int> size = number(environment, names.size);
  if (!size || *size <= 1) return std::nullopt;
  const int rank = number(environment, names.rank).value_or(0);
  MOEBIUS_CHECK(usage, rank < *size, "launch: {}={} must be below {}={}; unset both, or start this program with mpirun",
                names.rank, rank, names.size, *size);
  return Launch{
      .kind = Launch::Kind::mpi, .num_ranks = *size, .rank = rank, .evidence = fmt::format("{}={}", names.size, *size)};
}

}  // namespace

Environment process_environment() {
  return [](const char* name) { return std::getenv(name); };
}

Launch detect_launch(const Environment& environment) {
  for (const LauncherVariables& names : kMpiLaunchers)
    if (const auto launch = launch_by(environment, names)) return *launch;
  if (const auto launch = launch_by(environment, kTorchrun)) {
    MOEBIUS_FAIL(usage,
                 "launch: {} says that several processes were started, but no MPI launcher did; ranks are processes of "
                 "MPI: start them with mpirun -n {} or srun, or unset {} to train on one rank",
                 launch->evidence, launch->num_ranks, kTorchrun.size);
  }
  return {};
}

int launcher_rank(const Environment& environment) {
  try {
    return detect_launch(environment).rank;
  } catch (const Error&) {
    return 0;
  }
}

Launch launch_threads(int64_t num_ranks, const Launch& detected) {
  MOEBIUS_CHECK(usage, num_ranks >= 1, "--ranks: expected at least 1; got {}", num_ranks);
  MOEBIUS_CHECK(usage, detected.kind == Launch::Kind::alone,
                "--ranks {} makes the ranks threads of one process; got several processes from a launcher ({}); leave "
                "--ranks out",
                num_ranks, detected.evidence);
  if (num_ranks == 1) return {};
  MOEBIUS_CHECK(usage, num_ranks <= 1024, "--ranks: expected at most 1024; got {}", num_ranks);
  return {.kind = Launch::Kind::threads, .num_ranks = static_cast<int>(num_ranks)};
}

}  // namespace moebius
