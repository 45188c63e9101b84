// A call into a library that meets other ranks and knows no bound of its own: it runs on a thread, while the rank asks
// how the others are.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace moebius {

struct BoundedCall {
  std::string what;       // "making a communicator of group dp"
  std::vector<int> with;  // ranks of the world that the call meets
  // What it throws, call_bounded throws. May be left behind on its thread: it must own, or share, all that it touches.
  std::function<void()> body;
};

// Returns when body has. Error{distributed}, with the names of the ranks and this one's last collectives, when that
// takes longer than the world's timeout; what Transport::check throws when another rank fails meanwhile.
void call_bounded(Transport& world, BoundedCall call);

}  // namespace moebius
