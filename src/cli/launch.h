// How this process was started: alone, or as one of several ranks. The environment of launchers is read here.
#pragma once

#include <functional>
#include <string>

namespace moebius {

struct Launch {
  enum class Kind {
    alone,
    mpi,      // ranks are processes of an MPI world
    tcp,      // ranks are processes that find each other over TCP: torchrun, a container per rank, a loop of a shell
    threads,  // ranks are threads of this process: for debugging
  };
  Kind kind = Kind::alone;
  int num_ranks = 1;     // that the launcher says it started
  int rank = 0;          // of this process, as far as known before the ranks have met
  int local_rank = 0;    // among the ranks of its machine, as far as the launcher says
  std::string evidence;  // "OMPI_COMM_WORLD_SIZE=4"
  // Of tcp.
  std::string master_addr, host, run;  // where rank 0 is; this rank, empty: as it is seen; the run among others
  int master_port = 0;
  bool has_store = false;  // torchrun's agent keeps a store at master_addr:master_port
};

// The value of an environment variable, null when it is not set.
using Environment = std::function<const char*(const char* name)>;
Environment process_environment();

// From the variables of torchrun, of mpirun, of other launchers with PMI, and of srun, or from RANK, WORLD_SIZE,
// MASTER_ADDR and MASTER_PORT set by hand. Error{usage} for numbers that are none, and where some of the last four are
// missing: the processes would train the run several times.
Launch detect_launch(const Environment& environment);
// Of this process by the same variables; 0 where they say nothing that can be used.
int launcher_rank(const Environment& environment);

// Of a command of one process. Error{usage} where a launcher started several, on the first of them with the text: they
// would do the same work several times, and write the same files.
void check_alone(const std::string& command, const Launch& launch);

// The ranks that `--ranks` asks for, as threads. Error{usage} when a launcher has started several processes already.
Launch launch_threads(int64_t num_ranks, const Launch& detected);

}  // namespace moebius
