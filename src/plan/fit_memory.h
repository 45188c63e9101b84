// The recompute that fits into memory.fit and costs least: memory.recompute = "auto".
//
// Each rank of the pipeline is solved by itself: it holds its own layers, and as many sets of what they save as the
// schedule gives it. All sets of names are tried for all of its layers, with the exact bytes of rank_memory() and the
// times of part_time(). Of two sets, one too large and one that fits, as few layers as possible get the second.
// One constraint needs no more than two sets.
#pragma once

#include <string>

#include "plan/predict.h"

namespace moebius {

struct MemoryFit {
  RunSpec run;             // as asked, with what is recomputed; memory.automatic is false
  int64_t fit_bytes = 0;   // that a rank may need
  int64_t bytes = 0;       // that the fullest rank needs
  int64_t kept_bytes = 0;  // the same with nothing recomputed
  double more = 0;         // time of the slowest rank's passes, over that with nothing recomputed, minus 1
  // "memory.recompute = [...]: 78.9 GiB of 80GiB a rank; 131 GiB with nothing recomputed; passes take +4.1 % of time"
  std::string text() const;
};

// Takes the names out of memory.offload that memory.recompute covers in all layers: what is recomputed is not kept.
void leave_out_recomputed(MemorySpec& memory);

// Returns the run with its memory.recompute chosen if that is "auto", else as it is. machine: its rates decide which
// set costs least, and nothing else. parallel.dispatcher = "auto" must fit both with the direct dispatcher and without.
// Throws Error{usage} with the least bytes that do where nothing fits; where recompute is given and the run needs more
// than memory.fit; and the errors of planned_engine_spec().
MemoryFit fit_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                     const Assumptions& assume);

// Returns the same where no machine is named: the rates of an H100 or of a CPU, whichever run.device is.
MemoryFit fit_memory(const RunSpec& run, int64_t ranks);

}  // namespace moebius
