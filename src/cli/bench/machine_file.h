// Machine files that commands and recipes name.
#pragma once

#include "config/run_spec.h"
#include "plan/machine.h"

namespace moebius {

// Loads the file at a path, or NAME.toml of `machines`: below the working directory if the file is there, else in the
// first such folder above the program. Throws the errors of load_machine().
PlanMachine load_named_machine(const std::string& name_or_path);

// The help of --machine.
inline constexpr const char* kMachineOptionText =
    "a name in machines/, or the path of a machine file: parallel.dispatcher = \"auto\" compares times by its rates";

// Sets run.rates to the rates of the file that run.machine names, if it names one. Throws Error{usage} if the file is
// for another device than the run's.
void set_machine_rates(RunSpec& run);

}  // namespace moebius
