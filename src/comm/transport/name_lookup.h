// Resolves host names. The system resolver (getaddrinfo) may block on name servers for any time, and cannot be
// cancelled. So it runs on its own thread, which may outlive the NameLookup.
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
  std::string why_none;  // the reason if there are none: "Name or service not known"
};
using LookUp = std::function<Addresses(const HostPort&)>;

class NameLookup {
 public:
  // Starts the lookup, and does not wait. A numeric address ("10.0.0.3") needs no lookup.
  // look_up: null means the system resolver. It runs on another thread, so it must own, or share, all that it uses.
  explicit NameLookup(const HostPort& to, LookUp look_up = nullptr);
  // Returns the addresses once they are known, and null when they are not before the deadline.
  const Addresses* wait(Deadline deadline) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Starts to connect to one of these addresses, and does not wait; attempts 0, 1, ... try the addresses in turn. Once
// the socket can be written to, connect_error() says whether it is a connection. A closed socket: the attempt failed,
// with errno set. Throws Error{distributed} when there are none; it names the host.
Socket begin_connect(const HostPort& to, const Addresses& addresses, int attempt);
// Connects, and retries until the deadline: a name may not resolve yet, and a listener may not have started. Throws
// Error{distributed}, which names the host, and says whether it could not be resolved or did not answer.
Socket connect_until(const HostPort& to, Deadline deadline, const LookUp& look_up);

}  // namespace moebius
