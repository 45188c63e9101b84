// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct ClearStash;
struct AllocPages;
struct StashRows;
struct UnstashRows;
struct FreePages;
struct EndSpill;

namespace cpu {
void clear_stash(Stream& s, const ClearStash& a);
void alloc_pages(Stream& s, const AllocPages& a);
void stash_rows(Stream& s, const StashRows& a);
void unstash_rows(Stream& s, const UnstashRows& a);
void free_pages(Stream& s, const FreePages& a);
void end_spill(Stream& s, const EndSpill& a);
}  // namespace cpu

namespace cuda {
void clear_stash(Stream& s, const ClearStash& a);
void alloc_pages(Stream& s, const AllocPages& a);
void stash_rows(Stream& s, const StashRows& a);
void unstash_rows(Stream& s, const UnstashRows& a);
void free_pages(Stream& s, const FreePages& a);
void end_spill(Stream& s, const EndSpill& a);
}  // namespace cuda

}  // namespace moebius
