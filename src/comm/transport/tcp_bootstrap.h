// How the ranks of a world over TCP find each other: all come to rank 0 and say where they listen, rank 0 tells all of
// all, and each connects to those before it.
#pragma once

#include <vector>

#include "comm/transport/tcp.h"

namespace moebius {

// One connection to each other rank, by rank; none for this one. Error{distributed} when they do not meet within the
// timeout: at rank 0 it names who is missing. Error{usage} on all ranks where they disagree about the world.
std::vector<Socket> connect_all(const TcpOptions& options);

}  // namespace moebius
