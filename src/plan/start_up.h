// The messages by which ranks get to know each other before the first step, over TCP (comm/transport/tcp_bootstrap.h).
#pragma once

#include "comm/layout.h"
#include "plan/machine.h"

namespace moebius {

// Rank 0 lets in each other rank and sends each the table of all. Other connections are made at their first use, and do
// not count here. The two ends of a connection prove the job's secret by four messages. On GPUs each group needs an
// identity, which its first rank sends to the others (NCCL).
struct StartUp {
  double messages_rank_0 = 0;  // sent and received
  double messages_rank = 0;    // the most of another rank
  double connections = 0;      // that rank 0 holds; another holds one
  double table_bytes = 0;      // that rank 0 sends to all ranks together
  double seconds = 0;          // until the last rank knows all others
};

// Rank 0 is the bottleneck: its messages come one after another, each with the latency of the network, and its
// tables leave by its link.
StartUp start_up(const MeshShape& mesh, const PlanMachine& machine);

}  // namespace moebius
