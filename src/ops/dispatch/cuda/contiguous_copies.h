// Contiguous rows into windows by copy engines, which reach more of a link's rate than stores of multiprocessors.
#pragma once

#include "ops/dispatch/dispatch.h"

namespace moebius::cuda {

// Does what PushRows says where it gives the windows. Only work that is captured in a CUDA graph is copied so; for other
// work it does nothing, and returns false.
bool copy_contiguous(Stream& s, const PushRows& a);

}  // namespace moebius::cuda
