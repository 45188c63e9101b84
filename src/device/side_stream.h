// A side stream of a GPU: a second stream, for work that may overlap with that of the Accelerator's own stream. It is
// created at its first use.
#pragma once

#include <functional>

#include "device/accelerator.h"

namespace moebius {

// Runs body with the side stream in place of the accelerator's stream. The work of body begins after all work launched
// so far, and may overlap with work launched later, until join_side_stream(). It may be captured in a CudaGraph.
// REQUIRES: join_side_stream() follows, before the next call and before the host waits for all work.
void run_on_side_stream(Accelerator& a, const std::function<void()>& body);
// Makes work launched from now on wait for the work of run_on_side_stream().
void join_side_stream(Accelerator& a);

// Runs body with another stream of this GPU (cudaStream_t) in place of the accelerator's stream. Work of the two is
// ordered by events of the caller alone.
void run_on_stream(Accelerator& a, void* native_stream, const std::function<void()>& body);

}  // namespace moebius
