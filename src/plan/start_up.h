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
  double messages_rank = 0;    // the most of another rank
  double connections = 0;      // that rank 0 holds; another holds one
  double table_bytes = 0;      // that rank 0 sends to all ranks together
  double seconds = 0;          // until the last rank has the table
};

// Rank 0 is the bottleneck: its messages are sequential, each with the latency of the network, and it sends all tables
// over its link.
StartUp start_up(const MeshShape& mesh, const PlanMachine& machine);

}  // namespace moebius
