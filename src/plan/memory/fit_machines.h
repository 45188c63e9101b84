// The machines for which memory.fit chooses, where no machine file names one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "device/accelerator.h"
#include "device/gpus_found.h"
#include "plan/machine.h"

namespace moebius {

// The figures of the machines of a run on which the choice depends.
struct FitMachines {
  GpuKinds gpus;  // the kinds of all GPUs; the run fits on each of them
  // Host memory of a rank, on the machine that has the least. 0: that of the host of an H100.
  double rank_host_bytes = 0;
  // Memory of the GPU of a rank, the least of all ranks', or its part if ranks share one. None: it is not known.
  std::optional<int64_t> gpu_bytes;
};

// Returns those of this machine for a run on this device. If it has GPUs, a rank's share of the available host memory
// is in whole steps of 16 GiB, so that hosts of one kind give the same figure. The share is for as many ranks as
// there are GPUs or, if they are more, for up to 8 of `ranks`: a launcher may show each rank a GPU of its own.
// gpu_bytes is not set, since it takes a CUDA context on each GPU.
FitMachines fit_machine(DeviceKind device, int64_t ranks);
// Returns the largest number of ranks that share a GPU, if this many ranks of a machine share its GPUs evenly.
int64_t ranks_of_gpu(int64_t ranks, int64_t gpus);
// Returns the least memory that a rank has on the GPUs of this machine, for this many ranks on it; none without a GPU.
// This process keeps a CUDA context on each GPU that they use, so ranks of a run must not call it: each has only the
// memory of its own GPU to describe.
std::optional<int64_t> gpu_bytes_here(int64_t ranks);
// Returns the memory of a GPU for each of the ranks that share it. That is all of its memory, or, if other programs
// hold more than a GiB of it, what they leave, in whole GiB.
int64_t gpu_bytes_of_rank(const AcceleratorInfo& gpu, int64_t num_sharing);
// Returns those of several machines; all: at least one.
FitMachines common_machines(const std::vector<FitMachines>& all);
// Returns the machine for which memory is chosen: an H100 or a CPU with these figures.
PlanMachine usual_machine_of(DeviceKind device, const FitMachines& machines);

}  // namespace moebius
