// The addresses, in this process, of the windows of all ranks of a group, for comm/peer_window.h.
#pragma once

#include <string>
#include <vector>

#include "comm/group.h"
#include "device/peer_memory.h"

namespace moebius {

struct PeerPages {
  std::vector<PeerMemory> memories;  // by rank; this rank's own is empty
  std::vector<std::byte*> windows;   // indexed by rank: the start of its window, as an address in this process
  bool shares_gpu = false;           // another rank uses this rank's GPU too
  // The reason why some rank cannot access the memory of another, the same on every rank; empty if all can.
  std::string why_no_access;
};

// Maps the windows of all ranks into this process. All ranks of the group call it together, and each passes a window
// of its memory.
PeerPages open_peers(Group& group, const PeerMemory& memory, const Tensor& window);

// Tests one-sided access with memory of the stream's device: every rank maps the memory of all others of its group, and
// writes a number to it. num_bytes: the size of the run's window, since a limit may allow only less; at least 2 MiB.
// Returns the reason of the failure in the first group of the world that has one; empty if it worked everywhere. A
// rank that cannot make memory for the test is a failure too, unless its device lacks it: then little memory is tested,
// and the run reports the lack. All ranks of the world call it together, and get the same text.
std::string why_no_peer_access(Stream& s, Group& group, Group& world, int64_t num_bytes = 0);

}  // namespace moebius
