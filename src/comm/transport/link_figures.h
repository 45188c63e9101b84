// What the kernel measures of a TCP connection (TCP_INFO, linux/tcp.h).
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

// All but the peer. Nothing is sent. Where the kernel does not know a figure, it is 0.
LinkFigures link_figures(const Socket& connection);

}  // namespace moebius
