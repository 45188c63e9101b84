// Figures of a TCP connection that the kernel measures (TCP_INFO, linux/tcp.h).
#pragma once

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

// All but the peer, and whether there were always more bytes to send. Nothing is sent. Where the kernel does not know a
// figure, it is 0.
LinkFigures link_figures(const Socket& connection);

// Returns whether a message of num_bytes was so long that the rate is the link's, and not that of a short message: at
// this rate it takes kManyRoundTrips at least. A fast link moves the 14 KB that TCP begins with in each round trip, so a
// message of kLongBytes takes few. The kernel keeps the highest rate of the times in which too few bytes waited, so a
// late acknowledgement makes no link look slow.
inline constexpr int64_t kLongBytes = 1 << 14;
inline constexpr double kManyRoundTrips = 16;
bool is_rate_of_link(const LinkFigures& figures, int64_t num_bytes);

}  // namespace moebius
