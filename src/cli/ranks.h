// Runs a command as one rank of the world that its launcher, or --ranks, makes.
#pragma once

#include "cli/launch.h"
#include "comm/control.h"
#include "comm/layout.h"
#include "core/log.h"
#include "weights/not_finite.h"

namespace moebius {

// What run_ranks is told by --timeout and by the layout, which names the ranks in its messages: by their numbers alone
// where shape_of throws Error, which is for body to say. Error{usage} for a timeout that is none.
WorldOptions world_options(double timeout_s, const std::function<MeshShape()>& shape_of);

// Returns when every rank has ended body. What every rank throws comes back on every process, the same text on the
// first of them alone (the others throw it empty). Anything else that goes wrong on a rank of several ends all
// processes with exit code 6, after a report on standard error. Error{usage} when MPI finds another number of ranks
// than the launcher says it started.
void run_ranks(const Launch& launch, const WorldOptions& options, const RankBody& body);

// "4 ranks of MPI (OMPI_COMM_WORLD_SIZE=4, Open MPI v4.1.4)"
std::string launch_text(const Launch& launch);

// Of the weights at `path`, what the ranks have found in theirs; each text once, by the first rank.
void warn_of_not_finite(Log& log, Control& control, const std::string& path, const std::vector<NotFinite>& found);

// Of the CPUs that this process may use, its share beside the ranks of its machine that may use the same ones; >= 1.
int cpu_share(Control& control);

// Error{usage} unless all ranks run this command of the same program. The first that ranks tell each other, whichever
// command they run.
void check_same_program(Control& control, const std::string& command);

}  // namespace moebius
