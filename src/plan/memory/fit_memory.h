// Chooses the cheapest recompute with which a run fits into memory.fit: memory.recompute = "auto". On a GPU it also
// chooses which activations are in host memory, unless the recipe names memory.offload or memory.offload_fraction.
//
// Each pipeline rank is solved separately: it has its own layers, and the number of sets of their saved tensors that
// the schedule needs. All sets of names are tried for all of its layers, with the exact bytes of rank_memory() and the
// times of part_time(). Then two sets are combined, one that is too large and one that fits, so that as few layers as
// possible get the second. With one constraint an optimum needs at most two sets.
//
// All ranks offload the same. The search begins with nothing, and adds one name at a time while that
// makes the passes shorter; recompute is chosen anew for each list that is tried. A copy costs the time by which it is
// longer than the pass that it overlaps with, and its share of the bandwidth of the GPU's memory.
#pragma once

#include <optional>
#include <string>

#include "plan/memory/fit_machines.h"
#include "plan/memory/state_buffer.h"
#include "plan/predict.h"

namespace moebius {

struct MemoryFit {
  RunSpec run;               // the given run with its recompute and offload chosen; memory.automatic is false
  int64_t fit_bytes = 0;     // memory limit of a rank
  int64_t bytes = 0;         // memory of the rank that needs the most
  int64_t host_bytes = 0;    // host memory of the rank that needs the most
  int64_t kept_bytes = 0;    // as `bytes`, with nothing recomputed, and nothing offloaded but what the run names
  double pass_s = 0;         // time of the passes of a micro-batch of the slowest rank
  int64_t slowest_rank = 0;  // its pipeline rank
  double more = 0;           // its relative increase, compared with kept_bytes' run
  std::optional<StateBuffer> buffer;  // optimizer.offload_buffer, if it was chosen; `bytes` is without it
  // Returns a string such as "memory.recompute = [...]: a rank needs 78.9 GiB of memory.fit = 80GiB, and 131 GiB with
  // nothing recomputed; passes take 4.1 % longer". It has memory.offload too where something is offloaded. If a
  // buffer was chosen, it has optimizer.offload_buffer, and the bytes without it.
  std::string text() const;
};

// Removes from memory.offload the names that memory.recompute covers in all layers: a recomputed tensor is not kept.
void leave_out_recomputed(MemorySpec& memory);

// Returns the run with its memory.recompute chosen if that is "auto", else as it is. machine: its rates only decide
// which set costs least; its GPU decides which kernels' scratch counts and bounds the buffer of states, and its host
// how much may be offloaded. parallel.dispatcher = "auto" must fit both with the direct dispatcher and without.
// Throws Error{usage} with the minimum bytes if nothing fits, and if the recompute is given and the run needs more
// than memory.fit. Throws the errors of planned_engine_spec() too.
MemoryFit fit_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                     const Assumptions& assume);

// Does the same with the rates of an H100 or of a CPU, depending on run.device. Only a known machines.gpu_bytes bounds
// the buffer.
MemoryFit fit_memory(const RunSpec& run, int64_t ranks, const FitMachines& machines = {});

}  // namespace moebius
