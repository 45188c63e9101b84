// Large allocations of pinned host memory, for data that stays on the host for a whole run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/out_of_memory.h"

namespace moebius {

// The system did not pin host memory for a GPU. The caller that knows the memory plan says which keys ask for it
// (engine/pinned_advice.h).
class OutOfPinnedMemory : public OutOfMemory {
 public:
  // purpose: what the memory is for. why: the message of the failed call; empty: there is none.
  OutOfPinnedMemory(int64_t num_bytes, const std::string& purpose, const std::string& why = "");
};

}  // namespace moebius

namespace moebius::cuda {

// Allocations of at least this size are mapped as huge pages, touched by several threads, and then registered.
// The driver touches one page after another, which took half a second per GiB on the host of an H200 (2026-11-23).
inline constexpr int64_t kMappedBytes = int64_t{1} << 30;

// Returns zeroed pinned memory that every GPU of the process can access in place. Throws OutOfPinnedMemory when the
// host lacks it, or may not pin it.
std::shared_ptr<void> map_pinned(int64_t num_bytes);

}  // namespace moebius::cuda
