#include "comm/transport/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/error.h"

namespace moebius {
namespace {

bool wait_for(const Socket& s, short events, Deadline deadline) {
  pollfd p{.fd = s.descriptor(), .events = events, .revents = 0};
  for (;;) {
    const int ready = ::poll(&p, 1, milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

using NameOf = int (*)(int, sockaddr*, socklen_t*);

std::string number_of(const sockaddr& address, socklen_t size) {
  char host[NI_MAXHOST] = {};
  ::getnameinfo(&address, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

std::string host_of(const Socket& s, NameOf name_of) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (name_of(s.descriptor(), generic, &size) != 0) return "";
  // A listener for both families sees an IPv4 address with this prefix.
  const std::string text = number_of(*generic, size), mapped = "::ffff:";
  return text.starts_with(mapped) ? text.substr(mapped.size()) : text;
}

// Returns a listener of one family; on failure a closed socket, with errno set.
Socket try_listen(int family, int port, bool loopback_only) {
  Socket s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!s.is_open()) return s;
  const int on = 1, off = 0;
  ::setsockopt(s.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage address{};
  socklen_t size = sizeof(sockaddr_in);
  if (family == AF_INET6) {
    ::setsockopt(s.descriptor(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    auto& a = reinterpret_cast<sockaddr_in6&>(address);
    a.sin6_family = AF_INET6;
    a.sin6_port = htons(static_cast<uint16_t>(port));
    a.sin6_addr = in6addr_any;
    size = sizeof(sockaddr_in6);
  } else {
    auto& a = reinterpret_cast<sockaddr_in&>(address);
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(loopback_only ? INADDR_LOOPBACK : INADDR_ANY);
  }
  if (::bind(s.descriptor(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  if (::listen(s.descriptor(), SOMAXCONN) != 0) return {};
  prepare_socket(s);
  return s;
}

// Without a listener, the system may give a connecting socket of this machine the port that it connects to.
bool is_connected_to_itself(const Socket& s) {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  return ::getsockname(s.descriptor(), reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(s.descriptor(), reinterpret_cast<sockaddr*>(&other), &other_size) == 0 &&
         own_size == other_size && std::memcmp(&own, &other, own_size) == 0;
}

[[noreturn]] void fail_transfer(const char* verb, const char* what, const std::string& why) {
  MOEBIUS_FAIL(distributed, "tcp: {} {}: {}", verb, what, why);
}

}  // namespace

Deadline deadline_in(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

std::string to_string(const HostPort& a) { return fmt::format("{}:{}", a.host, a.port); }

// Messages are small or waited for, so none is delayed to fill a packet.
void prepare_socket(const Socket& s) {
  const int on = 1;
  ::setsockopt(s.descriptor(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::fcntl(s.descriptor(), F_SETFL, ::fcntl(s.descriptor(), F_GETFL) | O_NONBLOCK);
}

Socket::~Socket() {
  if (is_open()) ::close(descriptor_);
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

Socket listen_at(int port, bool loopback_only) {
  Socket s = loopback_only ? Socket() : try_listen(AF_INET6, port, false);
  if (!s.is_open()) s = try_listen(AF_INET, port, loopback_only);
  MOEBIUS_CHECK(distributed, s.is_open(), "tcp: listening at port {} failed: {}", port, std::strerror(errno));
  return s;
}

int port_of(const Socket& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(listener.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Socket accept_until(const Socket& listener, Deadline deadline) {
  while (wait_for(listener, POLLIN, deadline)) {
    Socket s(::accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!s.is_open() && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) continue;  // the caller has left
    MOEBIUS_CHECK(distributed, s.is_open(), "tcp: accepting a connection failed: {}", std::strerror(errno));
    prepare_socket(s);
    return s;
  }
  return {};
}

int connect_error(const Socket& s) {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(s.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error == 0 && is_connected_to_itself(s) ? ECONNREFUSED : error;
}

bool wait_readable(const Socket& s, Deadline deadline) { return wait_for(s, POLLIN, deadline); }
bool wait_writable(const Socket& s, Deadline deadline) { return wait_for(s, POLLOUT, deadline); }

bool read_available(const Socket& s, std::vector<std::byte>& received, size_t size, const char* what) {
  const size_t have = received.size();
  received.resize(size);
  const ssize_t n = ::recv(s.descriptor(), received.data() + have, size - have, MSG_DONTWAIT);
  const int error = errno;
  received.resize(have + std::max<ssize_t>(n, 0));
  if (n == 0) fail_transfer("receiving", what, "the other end has closed the connection");
  if (n < 0 && error != EAGAIN && error != EINTR) fail_transfer("receiving", what, std::strerror(error));
  return received.size() == size;
}

std::string peer_host(const Socket& connection) { return host_of(connection, ::getpeername); }
std::string own_host(const Socket& connection) { return host_of(connection, ::getsockname); }

std::vector<std::string> own_hosts() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> first(found, ::freeifaddrs);
  std::vector<std::string> hosts;
  for (const auto& [family, size] : {std::pair<int, socklen_t>{AF_INET, sizeof(sockaddr_in)},
                                     std::pair<int, socklen_t>{AF_INET6, sizeof(sockaddr_in6)}}) {
    for (const ifaddrs* a = first.get(); a != nullptr; a = a->ifa_next) {
      if (a->ifa_addr == nullptr || a->ifa_addr->sa_family != family) continue;
      if (!(a->ifa_flags & IFF_UP) || (a->ifa_flags & IFF_LOOPBACK)) continue;
      const std::string host = number_of(*a->ifa_addr, size);
      if (!host.empty() && !host.starts_with("fe80:")) hosts.push_back(host);  // fe80: is valid on one link only
    }
  }
  return hosts;
}

void write_all(const Socket& s, std::span<const std::byte> bytes, Deadline deadline, const char* what) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(s.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) {
      bytes = bytes.subspan(n);
    } else if (errno != EAGAIN && errno != EINTR) {
      fail_transfer("sending", what, std::strerror(errno));
    } else if (!wait_for(s, POLLOUT, deadline)) {
      fail_transfer("sending", what, "the other end does not accept it");
    }
  }
}

void read_all(const Socket& s, std::span<std::byte> bytes, Deadline deadline, const char* what) {
  while (!bytes.empty()) {
    const ssize_t n = ::recv(s.descriptor(), bytes.data(), bytes.size(), 0);
    if (n > 0) {
      bytes = bytes.subspan(n);
    } else if (n == 0) {
      fail_transfer("receiving", what, "the other end has closed the connection");
    } else if (errno != EAGAIN && errno != EINTR) {
      fail_transfer("receiving", what, std::strerror(errno));
    } else if (!wait_for(s, POLLIN, deadline)) {
      fail_transfer("receiving", what, "nothing came in time");
    }
  }
}

void write_text(const Socket& s, const std::string& text, Deadline deadline, const char* what) {
  write_value<int64_t>(s, std::ssize(text), deadline, what);
  write_all(s, std::as_bytes(std::span(text)), deadline, what);
}

std::string read_text(const Socket& s, Deadline deadline, const char* what, int64_t max_bytes) {
  const auto size = read_value<int64_t>(s, deadline, what);
  if (size < 0 || size > max_bytes) fail_transfer("receiving", what, fmt::format("a message of {} bytes", size));
  std::string text(size, 0);
  read_all(s, std::as_writable_bytes(std::span(text)), deadline, what);
  return text;
}

}  // namespace moebius
