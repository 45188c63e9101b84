// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/stash/stash_backends.h"

namespace moebius::cuda {

void clear_stash(Stream&, const ClearStash&) { missing_cuda("clear_stash"); }
void take_pages(Stream&, const TakePages&) { missing_cuda("take_pages"); }
void stash_rows(Stream&, const StashRows&) { missing_cuda("stash_rows"); }
void unstash_rows(Stream&, const UnstashRows&) { missing_cuda("unstash_rows"); }
void give_pages(Stream&, const GivePages&) { missing_cuda("give_pages"); }
void end_spill(Stream&, const EndSpill&) { missing_cuda("end_spill"); }

}  // namespace moebius::cuda
