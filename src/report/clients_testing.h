// Clients of a server on 127.0.0.1, for tests.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

namespace moebius {

// Returns a connection, or -1 where nobody takes it.
inline int connect_to(const char* host, int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
  ::inet_pton(AF_INET, host, &address.sin_addr);
  ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address);
  pollfd ready{.fd = socket, .events = POLLOUT};
  int error = 0;
  socklen_t size = sizeof error;
  if (::poll(&ready, 1, 20'000) == 1 && ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) {
    const timeval wait{.tv_sec = 20, .tv_usec = 0};
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
    ::fcntl(socket, F_SETFL, 0);
    return socket;
  }
  ::close(socket);
  return -1;
}

// Returns all that comes until the server closes.
inline std::string receive_all(int socket) {
  std::string answer;
  char buffer[65536];
  for (ssize_t got; (got = ::recv(socket, buffer, sizeof buffer, 0)) > 0;) answer.append(buffer, got);
  return answer;
}

// Sends these bytes, and returns all that comes until the server closes.
inline std::string exchange(int port, const std::string& request) {
  const int socket = connect_to("127.0.0.1", port);
  EXPECT_GE(socket, 0);
  EXPECT_EQ(::send(socket, request.data(), request.size(), MSG_NOSIGNAL), std::ssize(request));
  const std::string answer = receive_all(socket);
  ::close(socket);
  return answer;
}

// Clients that connect and keep their connections, until an object ends.
class SlowPeers {
 public:
  SlowPeers(int port, int count) {
    for (int i = 0; i < count; ++i) peers_.push_back(connect_to("127.0.0.1", port));
  }
  ~SlowPeers() {
    for (const int each : peers_) ::close(each);
  }
  void send(const std::string& bytes) const {
    for (const int each : peers_) ::send(each, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  const std::vector<int>& all() const { return peers_; }
  // Returns how many of them the server has closed.
  int64_t num_closed() const {
    return std::count_if(peers_.begin(), peers_.end(), [](int each) {
      char byte = 0;
      const ssize_t got = ::recv(each, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      return got == 0 || (got < 0 && errno != EAGAIN);
    });
  }

 private:
  std::vector<int> peers_;
};

}  // namespace moebius
