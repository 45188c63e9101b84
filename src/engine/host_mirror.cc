#include "engine/host_mirror.h"

namespace moebius {

HostMirror::HostMirror(const MemoryPlan& plan, Life life)
    : base_(plan.base(life)), memory_(DeviceKind::cuda, plan.bytes(life)) {}

Tensor HostMirror::at(Tensor t) const {
  if (t.data) t.data = static_cast<char*>(memory_.data()) + (static_cast<char*>(t.data) - static_cast<char*>(base_));
  t.device = DeviceKind::cpu;
  return t;
}

void HostMirror::to_device(Stream& s) const { copy_to_device(s, base_, memory_.data(), memory_.num_bytes()); }

void HostMirror::to_host(Stream& s) const { copy_to_host(s, memory_.data(), base_, memory_.num_bytes()); }

}  // namespace moebius
