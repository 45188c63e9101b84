// A port of the loopback address for a listener that starts later, in this process or another.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "comm/transport/socket.h"
#include "core/error.h"

namespace moebius {

// Holds a port while it lives: the system gives it to no other socket that asks for any free port. listen_at() can
// listen there by its number, because both sockets set SO_REUSEADDR and this one does not listen. Until listen_at() is
// called, the system refuses connections to the port.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in any_port{};
    any_port.sin_family = AF_INET;
    any_port.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool is_reserved =
        ::setsockopt(socket_.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(socket_.descriptor(), reinterpret_cast<const sockaddr*>(&any_port), sizeof any_port) == 0;
    MOEBIUS_CHECK(distributed, is_reserved, "ReservedPort: expected a free port of 127.0.0.1; got: {}",
                  std::strerror(errno));
  }
  int number() const { return port_of(socket_); }

 private:
  Socket socket_;
};

}  // namespace moebius
