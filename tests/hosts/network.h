// A few hosts on one machine, and the network between them.
//
//   Hosts     Each has a network, a host name and an address of its own (namespaces of Linux). They know each other's
//             names. Files, processes and users are those of the machine.
//   Links     Every two hosts have a link. What one sends to another goes through a process that a test controls: it
//             delays packets, loses some, lets only so many bytes pass in a second, or none.
//   Loopback  Ranks of one host reach each other without these links.
//
// The kernel has such links too (veth with netem), but not everywhere. A link here needs /dev/net/tun alone, and the
// right to make namespaces: root's, or that of a user where the system gives it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

// The treatment of packets by a link, in both directions.
struct LinkQuality {
  double delay_s = 0;
  double loss = 0;         // the share of packets that is lost, in a fixed pattern
  double bytes_per_s = 0;  // 0: any number
  bool is_cut = false;     // nothing passes, and no end learns of it
};

class Network {
 public:
  static constexpr int kMaxHosts = 8;

  explicit Network(int num_hosts);
  // Ends what still runs on the hosts. Nothing of the network is left, also when this process dies.
  ~Network();
  Network(const Network&) = delete;

  // Returns why this system does not allow it; empty: the hosts are there.
  const std::string& why_missing() const { return why_missing_; }
  int num_hosts() const { return num_hosts_; }
  static std::string name(int host);     // "host1"
  static std::string address(int host);  // "10.77.0.2"
  // Moves this process, which has one thread, to a host. Throws Error{io}.
  void enter(int host) const;
  // Writes a program that starts its words on a host: PROGRAM HOST WORD...; mpirun can start its daemons by it.
  void write_agent(const std::string& path) const;

  void set_link(int a, int b, const LinkQuality& quality);
  void set_links(const LinkQuality& quality);  // all of them
  // Returns the bytes of IP packets that one host has sent to another, headers and lost packets included.
  int64_t sent_bytes(int from, int to) const;
  // Returns the connections that one host has begun to another: TCP packets with SYN alone.
  int64_t num_connects(int from, int to) const;
  // Returns the processes that run on the hosts.
  std::vector<pid_t> processes() const;

 private:
  struct Link;
  struct Board;  // shared with the process of the network
  class Relay;
  Link& link(int from, int to) const;
  void run_network(int from_test, int to_test) const;

  const int num_hosts_;
  Board* board_ = nullptr;
  std::string why_missing_;
  pid_t network_ = -1;
  int alive_ = -1;  // the process of the network ends when this end of a pipe is closed
};

}  // namespace moebius
