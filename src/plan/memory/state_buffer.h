// Chooses optimizer.offload_buffer = "auto": how much of the masters and moments stays on a GPU with optimizer.offload.
//
// All other choices about memory are made first, without a buffer, except in `plan --search`, which compares layouts by
// their time with the buffer. The buffer holds all states if they fit. Else it is the largest with which no rank needs
// more than the limit, where each rank counts the slots that it has without a buffer. The limit is memory.fit, and
// never more than the known memory of the GPU less a margin. All ranks have the same buffer. It is as small as its
// states allow, and 0 if no state fits. Without a limit, on a CPU and without optimizer.offload, nothing is chosen,
// and the buffer is 0.
#pragma once

#include <string>

#include "plan/memory/run_memory.h"

namespace moebius {

// The share of a GPU's memory that a buffer leaves free, where memory.fit is not given. Layouts of `plan --search`
// leave the same share.
constexpr double kFreeShare = 0.05;
// A buffer is a multiple of 1 / kBufferStepsPerGib GiB, so that it is a short number.
constexpr double kBufferStepsPerGib = 1000;

struct StateBuffer {
  double gib = 0;           // optimizer.offload_buffer
  int64_t bytes = 0;        // memory of the rank that needs the most, with the buffer
  int64_t limit_bytes = 0;  // the most that it may need
  // Returns a string such as "optimizer.offload_buffer = 5.63: a rank needs 131.2 GiB of 133.95 GiB, 95 % of 141 GiB
  // that the GPU has for it", for a limit that is less than this memory by a margin.
  std::string text(int64_t gpu_bytes) const;
};

// Returns the memory of a GPU less the margin.
int64_t without_margin(int64_t gpu_bytes);

// Returns whether the run leaves a buffer to the choice, and has states on the host of a GPU.
bool chooses_buffer(const RunSpec& run);
// Returns the choice for the run of `memory`.
StateBuffer choose_state_buffer(const RunMemory& memory, int64_t limit_bytes);

}  // namespace moebius
