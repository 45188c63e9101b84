// The memory of all ranks of a group, as one of them reaches it: pointers that comm/peer_window.h writes through.
#pragma once

#include <string>
#include <vector>

#include "comm/group.h"
#include "device/peer_memory.h"

namespace moebius {

struct PeerPages {
  std::vector<PeerMemory> memories;  // by rank; this rank's own is empty
  std::vector<std::byte*> windows;   // by rank: where its window begins, as this rank sees it
  bool shares_gpu = false;           // this rank's GPU is another rank's too
  // It says why a rank cannot reach the memory of another, the same on every rank of the group. Empty: all reach all.
  std::string apart;
};

// All ranks of the group call it together. Each passes a window of its memory.
PeerPages open_peers(Group& group, const PeerMemory& memory, const Tensor& window);

// Tries it with a little memory of the stream's device: every rank writes to all others of its group. Returns
// PeerPages::apart, or whose writes did not arrive, of the first group of the world that has such ranks. So it is the
// same on every rank of the world. All of them call it together.
// Error{usage} when the device has no memory left.
std::string why_apart(Stream& s, Group& group, Group& world);

}  // namespace moebius
