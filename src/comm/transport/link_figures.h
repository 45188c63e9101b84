// Figures of a TCP connection that the kernel measures (TCP_INFO, linux/tcp.h).
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

// All but the peer, and whether there were always more bytes to send. Nothing is sent. Where the kernel does not know a
// figure, it is 0.
LinkFigures link_figures(const Socket& connection);

}  // namespace moebius
