// A supervisor runs the process of a rank as its child, for launchers that look at exit codes.
// mpirun and mpiexec end a job as soon as one of its processes dies of a signal.
// They use exit codes of their own (137, 9), and often end the job before the other ranks have
// reported which rank they wait for.
// The launcher knows only the supervisor, which does not die that way.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

namespace moebius {

// Forks, and continues in the child. Returns the pid of the supervisor in the child.
// Returns 0 where the system refuses to fork: the process then runs without a supervisor.
// end(code): ends the process of the supervisor.
// REQUIRES: one thread, nothing buffered in stdout, no MPI yet.
//
// The supervisor forwards signals where it can.
// A launcher that signals a whole process group also reaches the child.
// The supervisor ends with
//   the child's exit code   where the child exits with a code of Moebius
//   128 + n                 where a forwarded signal n, or SIGPIPE, has ended the child
//   6                       where another signal did: SIGKILL, SIGSEGV, one to this rank alone
//   6                       where the exit code is not Moebius's: MPI ends a process whose MPI_Init fails with 1
// Before it ends with 6 it calls `report` with a message that names the rank. Then it gives the other
// ranks grace_s seconds to report and to end the job.
// The child never outlives the supervisor: when the supervisor is killed, so is the child.
// When the launcher dies, the child is asked to end, and killed if it has not ended in
// ten times grace_s.
pid_t supervise_rank(const std::string& name, const std::function<void(const std::string&)>& report,
                     void (*end)(int code), double grace_s = 5);

}  // namespace moebius
