// The machines for which memory.fit chooses, where no machine file names one.
#pragma once

#include <cstdint>
#include <vector>

#include "device/gpus_found.h"

namespace moebius {

// The figures of the machines of a run on which the choice depends.
struct FitMachines {
  GpuKinds gpus;  // the kinds of all GPUs; the run fits on each of them
  // Host memory of a rank, on the machine that has the least. 0: that of the host of an H100.
  double rank_host_bytes = 0;
};

// Returns those of this machine for a run on this device. If it has GPUs, a rank's share of the available host memory is
// in whole steps of 16 GiB, so that hosts of one kind give the same figure. The share is for as many ranks as there are
// GPUs or, if they are more, for up to 8 of `ranks`: a launcher may show each rank a GPU of its own.
FitMachines fit_machine(DeviceKind device, int64_t ranks);
// Returns those of several machines; all: at least one.
FitMachines common_machines(const std::vector<FitMachines>& all);

}  // namespace moebius
