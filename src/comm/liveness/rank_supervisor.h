// The process of a rank as the child of another, its supervisor, for launchers that look at exit codes. mpirun and mpiexec
// end a job as soon as one of its processes dies of a signal, with a code of their own (137, 9), and often before the
// other ranks have said for whom they wait. The supervisor is the process that the launcher knows, and does not die so.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

namespace moebius {

// From here on this process is the child of what it was: returns in the child, the pid of the supervisor. Where the system
// lets no process be made it is the same as before: 0. end(code): ends the process, of the supervisor. REQUIRES one thread,
// nothing buffered in stdout, no MPI yet.
//
// The supervisor hands on what signals it can; a launcher that sends them to a whole group reaches the child itself, too.
// It ends with the child's exit code, and where a signal that it handed on, or SIGPIPE, has ended the child, with 128 +
// n. Where another signal did (SIGKILL, SIGSEGV, one to this rank alone), and where the exit code is none of Moebius's
// (MPI ends a process whose MPI_Init fails with 1), it says so by `report`, with the rank's name in front, gives the
// others grace_s to report and to end the job, and exits with 6. Nothing outlives the supervisor: when it is killed, so is
// the child; when the launcher is, the child is asked to end, and is killed when it has not in ten times grace_s.
pid_t keep_rank(const std::string& name, const std::function<void(const std::string&)>& report, void (*end)(int code),
                double grace_s = 5);

}  // namespace moebius
