// A bounded call runs a library call that waits for other ranks and has no timeout of its own.
// The call runs on its own thread, while the rank checks whether other ranks have failed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace moebius {

struct BoundedCall {
  std::string what;       // "making a communicator of group dp"
  std::vector<int> with;  // world ranks that the call waits for
  // call_bounded rethrows what it throws.
  // It may be abandoned on its thread, so it must own, or share, all that it uses.
  std::function<void()> body;
};

// Returns when body has returned.
// Throws Error{distributed}, with the names of the ranks and this rank's last collectives, when
// that takes longer than the world's timeout.
// Throws what Transport::check throws when another rank fails meanwhile.
void call_bounded(Transport& world, BoundedCall call);

}  // namespace moebius
