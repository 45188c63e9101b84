// A world whose ranks are processes that find each other over TCP.
// Any launcher can start them that gives each its number and an address of rank 0: torchrun, a
// container per rank, a shell loop.
// Each rank is connected to rank 0, and two other ranks once one of them has posted a message to the other.
// A thread of each rank moves messages while the rank computes.
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

// The connections of a rank to others.
struct TcpConnections {
  int at_start = 0, at_end = 0;
};

struct TcpOptions {
  WorldOptions world;
  int rank = 0, size = 1;
  HostPort master;         // where rank 0 listens
  bool has_store = false;  // torchrun listens at `master` instead and keeps a store, which holds rank 0's address
  std::string host;        // address at which other ranks reach this one; empty: the source address of its connections
  std::string run;         // a name that distinguishes the run from others at the same ports
  // Every connection proves this secret, of at least kShortestSecret characters. Empty: with a store,
  // rank 0 draws one and the store carries it; without, only ranks of one machine can connect.
  std::string secret;
  // Called with the report of a rank that ends the run.
  std::function<void(const std::string&)> report;
  // Called with a line for each of the first connections from outside the job, which are closed.
  std::function<void(const std::string&)> warn;
  // Ends the process at once.
  // It is called after the report, when another rank has failed and this rank's thread has
  // not communicated for stall_s since then: it may never return.
  std::function<void()> end_process;
  std::function<void(const TcpConnections&)> connections;  // called with the connections of this rank when it finishes
  double stall_s = 10;
  double grace_s = 2;  // time in which ranks with the same failure find each other
};

// Runs body as this process's rank and returns when all ranks have ended it.
//   body throws on every rank (a wrong recipe)
//              This function throws it. An Error whose message a lower rank throws too gets an empty message,
//              so that it is printed once.
//   a rank throws, or waits for another that is gone, or for longer than the timeout
//              It reports why, notifies the other ranks, and throws Error{distributed} with an empty message.
//              The other ranks throw the same.
void run_tcp(const TcpOptions& options, const RankBody& body);

}  // namespace moebius
