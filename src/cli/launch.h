// Finds whether this process was started alone or as one of several ranks, from the environment that its launcher set.
#pragma once

#include <functional>
#include <string>

namespace moebius {

struct Launch {
  enum class Kind {
    single,   // one process, without a launcher
    mpi,      // ranks are processes of an MPI world
    tcp,      // ranks are processes that find each other over TCP: torchrun, a container per rank, a loop of a shell
    threads,  // ranks are threads of this process: for debugging
  };
  Kind kind = Kind::single;
  int num_ranks = 1;     // number of ranks, by the launcher
  int rank = 0;          // rank of this process, if it is known before the rendezvous
  int local_rank = 0;    // index among the ranks of its machine, if the launcher gives it
  std::string evidence;  // the variable that shows the launcher: "OMPI_COMM_WORLD_SIZE=4"
  // With Kind::tcp:
  std::string master_addr;  // address of rank 0
  std::string host;         // address of this rank for the others; empty: that of its connection to rank 0
  std::string run;          // a name that distinguishes this job from others
  int master_port = 0;
  std::string secret;      // the secret of the job (docs/guide/ranks.md); empty if none was given
  bool has_store = false;  // torchrun's agent keeps a store at master_addr:master_port
};

// The value of an environment variable; null if it is not set.
using Environment = std::function<const char*(const char* name)>;
Environment process_environment();

// Reads the variables of torchrun, of mpirun, of other launchers with PMI, and of srun, or RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand. Throws Error{usage} if a value is not a number, or
// if some of the last four are missing, since the processes would train the run several times.
// For ranks over TCP it also reads MOEBIUS_HOST, MOEBIUS_SECRET, and the file that MOEBIUS_SECRET_FILE
// names: Error{usage} if both are set, the file cannot be read, or the secret is too short.
Launch detect_launch(const Environment& environment);
// Returns the rank of this process by the same variables; 0 if they give nothing that can be used.
int launcher_rank(const Environment& environment);

// For a command that runs in one process. Throws Error{usage} if a launcher started several, since they
// would do the same work and write the same files. Only the error of the first process has a text.
void check_single_process(const std::string& command, const Launch& launch);

// Returns the ranks that `--ranks` asks for, as threads. Throws Error{usage} if a launcher has
// started several processes.
Launch launch_threads(int64_t num_ranks, const Launch& detected);

}  // namespace moebius
