// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/stash/stash_backends.h"

namespace moebius::cuda {

void clear_stash(Stream&, const ClearStash&) { missing_cuda("clear_stash"); }
void alloc_pages(Stream&, const AllocPages&) { missing_cuda("alloc_pages"); }
void stash_rows(Stream&, const StashRows&) { missing_cuda("stash_rows"); }
void unstash_rows(Stream&, const UnstashRows&) { missing_cuda("unstash_rows"); }
void free_pages(Stream&, const FreePages&) { missing_cuda("free_pages"); }
void end_spill(Stream&, const EndSpill&) { missing_cuda("end_spill"); }

}  // namespace moebius::cuda
