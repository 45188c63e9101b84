// A world whose ranks are processes that find each other over TCP, started by anything that gives each its number and
// an address of rank 0: torchrun, a container per rank, a loop of a shell. Every two ranks share a connection, and a
// thread of each rank moves what is on its way while the rank computes.
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

struct TcpOptions {
  WorldOptions world;
  int rank = 0, size = 1;
  HostPort master;         // where rank 0 listens
  bool has_store = false;  // torchrun listens there in its place and keeps a store, which says where rank 0 is
  std::string host;        // at which the others reach this rank; empty: the address from which its connections come
  std::string run;         // names the run among others that may meet at these ports
  // Gets the report of a rank that ends the run.
  std::function<void(const std::string&)> report;
  // Ends the process at once. Called, after the report, when another rank has failed and this one's thread has not
  // communicated for stall_s since: it may never come back.
  std::function<void()> end_process;
  double stall_s = 10;
  double grace_s = 2;  // in which the ranks of one failure find each other
};

// Runs body as this process's rank and returns when all ranks have ended it. Where body throws on every rank (a wrong
// recipe), so does this function; an Error whose text a rank before this one throws too comes with an empty text, so
// that it is printed once. Otherwise a rank that throws, or waits for another that is gone or for longer than the
// timeout, reports why, tells the others, and throws Error{distributed} with an empty text; so do the others.
void run_tcp(const TcpOptions& options, const RankBody& body);

}  // namespace moebius
