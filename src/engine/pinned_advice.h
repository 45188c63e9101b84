// The error for host memory that cannot be pinned for a GPU, with the keys that request it.
#pragma once

#include "device/pinned_memory.h"
#include "engine/device_memory.h"
#include "memory/plan.h"

namespace moebius {

// Throws Error{usage} with the bytes that were refused, what the plan keeps in pinned memory and by which key, what to
// change, and the plan's table.
[[noreturn]] void fail_pinning(const MemoryPlan& plan, const OutOfPinnedMemory& refused, const KeptOnHost& kept);

// Runs body, which allocates the memory of the plan.
template <class Body>
void with_pinned_advice(const MemoryPlan& plan, const KeptOnHost& kept, Body&& body) {
  try {
    body();
  } catch (const OutOfPinnedMemory& refused) {
    fail_pinning(plan, refused, kept);
  }
}

}  // namespace moebius
