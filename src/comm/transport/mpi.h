// A world whose ranks are processes started by mpirun or srun. Standard MPI-3
// calls of one thread alone, the one that calls run_mpi.
#pragma once

#include "comm/transport/transport.h"

namespace moebius {

struct MpiOptions {
  WorldOptions world;
  int rank = 0;  // of this process, as far as its launcher says: for what is to be said before MPI has begun
  // Gets the report of a rank that ends the run, just before the process is ended: there is no later. From any thread.
  std::function<void(const std::string&)> report;
  // Gets, on rank 0, what the run goes on without.
  std::function<void(const std::string&)> warn;
  // Ends the process at once. Called, after the report, from another thread when a call of MPI itself that meets all
  // ranks (MPI_Init, MPI_Finalize, making a communicator) has waited for longer than the timeout: it cannot be left.
  std::function<void()> end_process;
};

// "Open MPI v4.1.4, ..."; empty where the program was built without MPI.
std::string mpi_version();

// Runs body as this process's rank of MPI_COMM_WORLD and returns when all ranks have ended it. Once in a process.
// Where body throws on every rank (a wrong recipe), so does this function; an Error whose text a rank before this one
// throws too comes with an empty text, so that it is printed once. Otherwise a rank that throws, or waits
// for another for longer than the timeout, reports why and ends all processes with MPI_Abort and
// ErrorKind::distributed as the exit code. A rank that does not come to MPI's own calls cannot be named. When the
// process of a rank ends otherwise, the others report that at once (comm/liveness/rank_watch.h) and end as well; a launcher that
// sees it ends them too, soon, with an exit code of its own. Error{usage} where the program was built without MPI.
void run_mpi(const MpiOptions& options, const RankBody& body);

}  // namespace moebius
