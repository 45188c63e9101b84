// The ranks of a world over TCP find each other with this, in O(n) messages. All connect to rank 0 and send where they
// listen. Rank 0 sends all of these addresses to all ranks. Other connections are made at their first use
// (comm/transport/link_maker.h). Each connection proves the job's secret first (comm/transport/handshake.h).
#pragma once

#include <vector>

#include "comm/transport/handshake.h"
#include "comm/transport/tcp.h"

namespace moebius {

// A rank has this when all have met.
struct Meeting {
  std::vector<Socket> sockets;   // by rank: at rank 0 to all others, elsewhere to rank 0 alone; the rest is closed
  Job job;                       // for connections that come later
  Socket listener;               // where higher ranks connect; closed where none will
  std::vector<HostPort> places;  // by rank: where it listens; port 0: nowhere
};

// Throws Error{distributed} when the ranks do not meet within the timeout:
// at rank 0 it names the missing ranks.
// Throws Error{usage} on all ranks when they disagree about the world, or when other machines can
// reach rank 0 and there is no secret.
Meeting meet(const TcpOptions& options);

}  // namespace moebius
