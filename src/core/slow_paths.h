// Ops that a GPU runs by slower kernels than it has, because of their shapes: noted where an op chooses, told by a run.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "core/accelerator.h"
#include "core/device.h"

namespace moebius {

struct SlowPaths {
  std::map<std::string, std::string, std::less<>> why;  // by op, as it was noted first
};

// why: what the fast kernels want and what they got. Kept by the accelerator of s.
inline void note_slow_path(const Stream& s, std::string_view op, const std::string& why) {
  SlowPaths& slow = s.accelerator().state<SlowPaths>();
  if (!slow.why.contains(op)) slow.why.emplace(op, why);
}

}  // namespace moebius
