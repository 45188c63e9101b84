// Large pieces of pinned host memory, as what is kept there for a whole run.
#pragma once

#include <cstdint>
#include <memory>

namespace moebius::cuda {

// From this size on memory is mapped in huge pages, which several threads touch, and then registered. The driver
// alone touches page after page, and took half a second a GiB on the host of an H200 (2026-11-23).
inline constexpr int64_t kMappedBytes = int64_t{1} << 30;

// Returns zeroed pinned memory that every GPU of the process reads and writes where it is. Throws OutOfMemory where
// the host does not have it, or may not pin it.
std::shared_ptr<void> map_pinned(int64_t num_bytes);

}  // namespace moebius::cuda
