// Copies contiguous rows into windows by copy engines, which reach more of a link's rate than stores
// of multiprocessors.
#pragma once

#include "ops/dispatch/dispatch.h"

namespace moebius::cuda {

// Runs push_rows by copy engines if the work is captured in a CUDA graph, and returns true. Else it copies nothing,
// and returns false. REQUIRES: a.windows is not empty.
bool copy_contiguous(Stream& s, const PushRows& a);

}  // namespace moebius::cuda
