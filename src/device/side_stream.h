// Work of a GPU beside that of its stream: on a second stream of the Accelerator, which is made at first use.
#pragma once

#include <functional>

#include "device/accelerator.h"

namespace moebius {

// Runs body with the second stream as the accelerator's stream. What body launches begins after all work launched so
// far, and may run beside what is launched after it, until join_side_stream(). Both may be part of a CudaGraph.
// REQUIRES: each call is followed by one of join_side_stream(), before the next call and before the host waits for all work.
void run_on_side_stream(Accelerator& a, const std::function<void()>& body);
// Makes later work wait for that of run_on_side_stream().
void join_side_stream(Accelerator& a);

}  // namespace moebius
