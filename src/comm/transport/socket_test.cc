#include "comm/transport/socket.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "comm/transport/reserved_port_testing.h"

namespace moebius {
namespace {

// The system may give a connecting socket the very port that it connects to. If nobody listens there, the socket is
// then connected to itself.
TEST(Socket, AConnectionToItselfCountsAsRefused) {
  const ReservedPort port;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port.number()));
  const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
  const Socket s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(s.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  ASSERT_EQ(::bind(s.descriptor(), generic, sizeof address), 0);
  ASSERT_EQ(::connect(s.descriptor(), generic, sizeof address), 0);
  EXPECT_EQ(connect_error(s), ECONNREFUSED);
}

TEST(Socket, AConnectionToAListenerOfTheSameHostCountsAsConnected) {
  const Socket listener = listen_at(0, /*loopback_only=*/true);
  const Socket s = connect_until({.host = "127.0.0.1", .port = port_of(listener)}, deadline_in(10));
  EXPECT_EQ(connect_error(s), 0);
}

}  // namespace
}  // namespace moebius
