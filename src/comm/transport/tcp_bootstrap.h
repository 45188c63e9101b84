// The ranks of a world over TCP find each other with this. All connect to rank 0 and send where
// they listen. Rank 0 sends all of these addresses to all ranks. Each rank then connects to
// those before it. Each connection proves the job's secret first (comm/transport/admission.h).
#pragma once

#include <vector>

#include "comm/transport/tcp.h"

namespace moebius {

// Returns one connection to each other rank, by rank; this rank's own is closed.
// Throws Error{distributed} when the ranks do not meet within the timeout:
// at rank 0 it names the missing ranks.
// Throws Error{usage} on all ranks when they disagree about the world, or when other machines can
// reach rank 0 and there is no secret.
std::vector<Socket> connect_all(const TcpOptions& options);

}  // namespace moebius
