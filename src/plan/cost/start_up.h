// The messages of the rendezvous over TCP, before the first step (comm/transport/tcp_bootstrap.h).
#pragma once

#include "comm/layout.h"
#include "plan/machine.h"

namespace moebius {

// Rank 0 accepts each other rank, and sends it the table of all addresses. Other connections are made at their first
// use, and do not count here. The handshake of a connection takes four messages. On GPUs each group needs an identity,
// which its first rank sends to the others (NCCL).
struct StartUp {
  double messages_rank_0 = 0;  // sent and received
  double messages_rank = 0;    // the maximum of any other rank
  double connections = 0;      // connections of rank 0; every other rank has one
  double table_bytes = 0;      // bytes of the address table, which rank 0 sends, to all ranks together
  double seconds = 0;          // until the last rank has the table
};

// Rank 0 is the bottleneck: its messages are sequential, each with the latency of the network, and it sends all tables
// over its link.
StartUp start_up(const MeshShape& mesh, const PlanMachine& machine);

}  // namespace moebius
