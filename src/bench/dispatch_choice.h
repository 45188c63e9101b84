// The dispatcher of `moebius bench dispatch`.
#pragma once

#include "bench/dispatch.h"
#include "comm/mesh.h"

namespace moebius {

// Returns the dispatcher that a training run has on these ranks. `auto` tests which memory they can access, and on GPUs
// means steps that may be captured.
DispatcherKind dispatcher_of(const DispatchBenchSpec& spec, Stream& s, const Mesh& mesh, const BenchShape& shape);

}  // namespace moebius
