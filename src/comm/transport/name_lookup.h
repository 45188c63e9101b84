// The addresses of a host. The system's look-up (getaddrinfo) waits for name servers as long as it likes, and cannot be
// ended. So it runs on a thread of its own, which may outlive the NameLookup.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/socket.h"

namespace moebius {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

struct Addresses {
  std::vector<SocketAddress> all;
  std::string why_none;  // why there are none now: "Name or service not known"
};
using LookUp = std::function<Addresses(const HostPort&)>;

class NameLookup {
 public:
  // Begins, and does not wait. The addresses of a number ("10.0.0.3") are known at once, without look_up.
  // look_up: null is the system's. It is called on another thread, so it must own, or share, all that it uses.
  explicit NameLookup(const HostPort& to, LookUp look_up = nullptr);
  // Returns the addresses once they are known, and null when they are not before the deadline.
  const Addresses* wait(Deadline deadline) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Begins to connect to one of these addresses, which attempts 0, 1, ... try one after another, and does not wait. Once
// the socket can be written to, connect_error() says whether it is a connection. A closed socket: the attempt failed,
// with errno set. Throws Error{distributed} when there are none; it names the host.
Socket begin_connect(const HostPort& to, const Addresses& addresses, int attempt);
// Tries until the deadline: a name may not be known yet, and a listener may not have started.
// The text of an Error{distributed} names the host, and says whether its name or its answer is missing.
Socket connect_until(const HostPort& to, Deadline deadline, const LookUp& look_up);

}  // namespace moebius
