// All choices about memory that a run leaves to the plan: those of memory.fit, and optimizer.offload_buffer = "auto".
#pragma once

#include <string>

#include "plan/memory/fit_machines.h"
#include "plan/predict.h"

namespace moebius {

struct ChosenMemory {
  RunSpec run;
  std::string text;  // what was chosen; empty if nothing was
  // The limit of a chosen buffer, as the provenance of its key names it: "memory.fit" or "the memory of the GPU".
  std::string buffer_limit;       // empty if no buffer was chosen
  void apply(RunSpec& to) const;  // sets what was chosen in this run
};

// Returns whether the run leaves anything to these choices, if the memory of its GPU is known.
bool chooses_memory(const RunSpec& run);

// Returns the run with its choices made, for memory.fit and the memory of the machine's GPU. Nothing is chosen for
// Megatron Core. Throws the errors of fit_memory(), and Error{usage} if a rank of Megatron Core needs too much.
ChosenMemory choose_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                           const Assumptions& assume);
// Does the same for the machines of a run.
ChosenMemory choose_memory(const RunSpec& run, int64_t ranks, const FitMachines& machines);

}  // namespace moebius
