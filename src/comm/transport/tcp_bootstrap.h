// The rendezvous of a world over TCP, in O(n) messages. All ranks connect to rank 0 and send the address at which they
// listen. Rank 0 sends all addresses to all ranks. Other connections are made at their first use
// (comm/transport/link_maker.h). Each connection begins with a handshake (comm/transport/handshake.h).
#pragma once

#include <vector>

#include "comm/transport/handshake.h"
#include "comm/transport/tcp.h"

namespace moebius {

// The result of the rendezvous at one rank.
struct Rendezvous {
  // Indexed by rank: rank 0 is connected to all, the others only to rank 0. All other sockets are closed.
  std::vector<Socket> sockets;
  Job job;                       // used for the handshakes of later connections
  Socket listener;               // accepts connections of higher ranks; closed if there are none
  std::vector<HostPort> places;  // indexed by rank: the address at which it listens; port 0: none
};

// Throws Error{distributed} if not all ranks arrive within the timeout; at rank 0 the message names the missing ranks.
// Throws Error{usage} on all ranks if they disagree about the world, or if other machines can reach rank 0 and there is
// no secret.
Rendezvous rendezvous(const TcpOptions& options);

}  // namespace moebius
