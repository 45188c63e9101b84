// How this process was started: alone, or as one of several ranks. The environment of launchers is read here.
#pragma once

#include <functional>
#include <string>

namespace moebius {

struct Launch {
  enum class Kind {
    alone,
    mpi,      // ranks are processes of an MPI world
    threads,  // ranks are threads of this process: for debugging
  };
  Kind kind = Kind::alone;
  int num_ranks = 1;     // that the launcher says it started
  int rank = 0;          // of this process, as far as known before the ranks have met
  std::string evidence;  // "OMPI_COMM_WORLD_SIZE=4"
};

// The value of an environment variable, null when it is not set.
using Environment = std::function<const char*(const char* name)>;
Environment process_environment();

// From the variables of mpirun, of srun and of other launchers with PMI. Error{usage} for numbers that are none, and
// for a launcher that started several processes that MPI does not know (torchrun): they would train the run several
// times.
Launch detect_launch(const Environment& environment);
// Of this process by the same variables; 0 where they say nothing that can be used.
int launcher_rank(const Environment& environment);

// The ranks that `--ranks` asks for, as threads. Error{usage} when a launcher has started several processes already.
Launch launch_threads(int64_t num_ranks, const Launch& detected);

}  // namespace moebius
