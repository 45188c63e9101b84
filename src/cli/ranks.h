// Runs a command as one rank of the world that its launcher, or --ranks, makes.
#pragma once

#include "cli/launch.h"
#include "comm/control.h"
#include "comm/layout.h"
#include "core/log.h"
#include "weights/not_finite.h"

namespace moebius {

// Returns the options of run_ranks, from --timeout and from the layout. Messages name ranks by their coordinates, or by
// number if shape_of throws an Error, which body will report. Throws Error{usage} if the timeout is out of range.
WorldOptions world_options(std::optional<double> timeout_s, const std::function<MeshShape()>& shape_of);

// Returns when every rank has ended body. An error that every rank throws is thrown on every
// process; only the first process's has the text. Any other failure of one of several ranks ends
// all processes with exit code 6, after a report on standard error. Throws Error{usage} if MPI finds
// another number of ranks than the launcher gave.
void run_ranks(const Launch& launch, const WorldOptions& options, const RankBody& body);

// Returns a string such as "4 ranks of MPI (OMPI_COMM_WORLD_SIZE=4, Open MPI v4.1.4)"
std::string launch_text(const Launch& launch);

// Warns of the values that ranks found in their parts of the weights at `path`. The first rank
// prints each text once.
void warn_of_not_finite(Log& log, Control& control, const std::string& path, const std::vector<NotFinite>& found);

// Returns the number of CPUs for a rank: its share of those that it may use, which other ranks of its machine use too;
// at least 1.
int cpu_share(Control& control);

// Throws Error{usage} unless all ranks run this command of the same program. It is the first exchange
// between ranks, in every command.
void check_same_program(Control& control, const std::string& command);

}  // namespace moebius
