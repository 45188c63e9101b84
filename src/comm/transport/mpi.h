// A world whose ranks are processes started by mpirun or srun.
// It uses standard MPI-3 calls from a single thread, the one that calls run_mpi.
#pragma once

#include "comm/transport/transport.h"

namespace moebius {

struct MpiOptions {
  WorldOptions world;
  int rank = 0;  // rank of this process by its launcher's variables, for messages before MPI_Init
  // Called with the report of a rank that ends the run, just before the process is ended.
  // May be called from any thread.
  std::function<void(const std::string&)> report;
  // Called on rank 0 with a message that names what is missing, if the run continues without it.
  std::function<void(const std::string&)> warn;
  // Ends the process at once. It is called after the report, from another thread, when a call of MPI that waits for
  // all ranks takes longer than the timeout. Such calls are MPI_Init, MPI_Finalize and making a communicator, which
  // cannot be interrupted.
  std::function<void()> end_process;
};

// Returns "Open MPI v4.1.4, ..."; empty where the program was built without MPI.
std::string mpi_version();

// Runs body as this process's rank of MPI_COMM_WORLD and returns when all ranks have ended it.
// May be called once in a process. Throws Error{usage} where the program was built without MPI.
//   body throws on every rank (a wrong recipe)
//              This function throws it. An Error whose message a lower rank throws too gets an empty message,
//              so that it is printed once.
//   a rank throws, or waits for another for longer than the timeout
//              It reports why and ends all processes with MPI_Abort; ErrorKind::distributed is the exit code.
//              A rank that is missing in MPI's own calls cannot be named.
//   the process of a rank ends otherwise
//              The other ranks report that at once (comm/liveness/rank_watch.h) and end as well.
//              A launcher that sees it also ends them soon, with an exit code of its own.
void run_mpi(const MpiOptions& options, const RankBody& body);

}  // namespace moebius
