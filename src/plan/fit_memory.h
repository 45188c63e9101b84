// Chooses the cheapest recompute with which a run fits into memory.fit: memory.recompute = "auto".
//
// Each pipeline rank is solved separately: it has its own layers, and the number of sets of their saved tensors that
// the schedule needs. All sets of names are tried for all of its layers, with the exact bytes of rank_memory() and the
// times of part_time(). Then two sets are combined, one that is too large and one that fits, so that as few layers as
// possible get the second. With one constraint an optimum needs at most two sets.
#pragma once

#include <string>

#include "device/gpus_found.h"
#include "plan/predict.h"

namespace moebius {

struct MemoryFit {
  RunSpec run;             // the given run with its recompute chosen; memory.automatic is false
  int64_t fit_bytes = 0;   // memory limit of a rank
  int64_t bytes = 0;       // memory of the rank that needs the most
  int64_t kept_bytes = 0;  // the same with nothing recomputed
  double more = 0;         // relative increase of the slowest rank's pass time, compared with nothing recomputed
  // Returns a string such as "memory.recompute = [...]: 78.9 GiB of 80GiB a rank; 131 GiB with nothing recomputed;
  // passes take +4.1 % of time"
  std::string text() const;
};

// Removes from memory.offload the names that memory.recompute covers in all layers: a recomputed tensor is not kept.
void leave_out_recomputed(MemorySpec& memory);

// Returns the run with its memory.recompute chosen if that is "auto", else as it is. machine: its rates only decide
// which set costs least; its GPU decides which kernels' scratch counts. parallel.dispatcher = "auto" must fit both with
// the direct dispatcher and without. Throws Error{usage} with the minimum bytes if nothing fits, and if the recompute
// is given and the run needs more than memory.fit. Throws the errors of planned_engine_spec() too.
MemoryFit fit_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                     const Assumptions& assume);

// Does the same with the rates of an H100 or of a CPU, depending on run.device. gpus: the kinds of GPUs of the run, as
// gpu_kinds() in device/gpus_found.h returns them. The run fits on each of them.
MemoryFit fit_memory(const RunSpec& run, int64_t ranks, const GpuKinds& gpus = {});

}  // namespace moebius
