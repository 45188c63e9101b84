// The kernel's measurements of a TCP connection (TCP_INFO, linux/tcp.h).
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

// Fills all fields but `peer` and `is_filled`. Sends nothing. A value that the kernel does not know is 0.
LinkMeasurement measure_link(const Socket& connection);

}  // namespace moebius
