#include "report/http_connections.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <list>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/start_thread.h"
#include "io/files.h"

namespace moebius {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMaxRequestBytes = 65536;
constexpr milliseconds kLinger{1000};  // for what a client still sends while it reads its answer
constexpr milliseconds kPause{100};    // before the next attempt, where the system has no descriptor left

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

struct Connection {
  enum class State { reading, writing, lingering, closed };

  Descriptor socket;
  Clock::time_point deadline;
  State state = State::reading;
  std::string bytes = {};  // of the request, and then of the answer
  size_t sent = 0;         // bytes of the answer
};
using State = Connection::State;

bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

Descriptor listen_on(int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  MOEBIUS_CHECK(io, socket.get() >= 0, "watch: no socket can be made: {}; close other programs, or raise ulimit -n",
                errno_text(errno));
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool is_bound = ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                        ::listen(socket.get(), SOMAXCONN) == 0;
  const int error = errno;
  MOEBIUS_CHECK(io, is_bound,
                "watch: port {} of 127.0.0.1 cannot be bound: {}; give another --port, or --port 0 for a free one",
                port, errno_text(error));
  return socket;
}

int port_of(const Descriptor& socket) {
  sockaddr_in address = {};
  socklen_t size = sizeof address;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

}  // namespace

class HttpConnections::Impl {
 public:
  Impl(int port, Answer answer, const Limits& limits)
      : answer_(std::move(answer)), limits_(limits), listener_(listen_on(port)), port_(port_of(listener_)) {
    MOEBIUS_CHECK(io, wake_.get() >= 0, "watch: the system has no descriptor left; close programs or raise ulimit -n");
    thread_ = start_thread([this] { return std::thread([this] { serve(); }); });
  }
  ~Impl() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }
  int port() const { return port_; }

 private:
  void serve();
  void take_connections();
  void make_room();
  void read_from(Connection& c);
  void write_to(Connection& c);
  void drain(Connection& c);
  void start_answer(Connection& c);

  Answer answer_;
  Limits limits_;
  Descriptor listener_;
  Descriptor wake_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  int port_;
  std::list<Connection> connections_;  // the oldest first
  Clock::time_point next_accept_{};    // earlier the listener is not asked
  std::thread thread_;
};

void HttpConnections::Impl::serve() {
  std::vector<pollfd> polled;
  for (;;) {
    const auto now = Clock::now();
    auto wait = milliseconds(-1);
    const auto wait_until = [&](Clock::time_point time) {
      const auto left = std::max(std::chrono::ceil<milliseconds>(time - now), milliseconds(0));
      wait = wait < milliseconds(0) ? left : std::min(wait, left);
    };
    const bool accepts = now >= next_accept_;
    if (!accepts) wait_until(next_accept_);
    polled.assign({{.fd = wake_.get(), .events = POLLIN, .revents = 0},
                   {.fd = accepts ? listener_.get() : -1, .events = POLLIN, .revents = 0}});
    for (const Connection& c : connections_) {
      polled.push_back({.fd = c.socket.get(),
                        .events = static_cast<short>(c.state == State::writing ? POLLOUT : POLLIN),
                        .revents = 0});
      wait_until(c.deadline);
    }
    if (::poll(polled.data(), polled.size(), static_cast<int>(wait.count())) < 0 && errno != EINTR)
      std::this_thread::sleep_for(kPause);  // the system has no memory for it now
    if (polled[0].revents != 0) return;
    size_t at = 2;
    for (Connection& c : connections_) {
      if (polled[at++].revents == 0) continue;
      if (c.state == State::reading)
        read_from(c);
      else if (c.state == State::writing)
        write_to(c);
      else
        drain(c);
    }
    const auto later = Clock::now();
    connections_.remove_if([&](const Connection& c) { return c.state == State::closed || c.deadline <= later; });
    if (polled[1].revents != 0) take_connections();
    make_room();
  }
}

void HttpConnections::Impl::take_connections() {
  for (;;) {
    Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.get() >= 0) {
      connections_.push_back({.socket = std::move(socket), .deadline = Clock::now() + limits_.request});
      read_from(connections_.back());  // most requests are there at once
      make_room();
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      next_accept_ = Clock::now() + kPause;
      return;
    } else if (would_wait()) {
      return;
    }  // else this client has gone already
  }
}

// Closes connections until the limits hold.
void HttpConnections::Impl::make_room() {
  connections_.remove_if([](const Connection& c) { return c.state == State::closed; });
  const auto oldest = [&](State state) {
    return std::find_if(connections_.begin(), connections_.end(), [&](const auto& c) { return c.state == state; });
  };
  while (connections_.size() > limits_.connections) {
    auto one = oldest(State::reading);
    if (one == connections_.end()) one = connections_.begin();
    connections_.erase(one);
  }
  size_t waiting = 0;
  for (const Connection& c : connections_) waiting += c.state == State::writing ? c.bytes.size() - c.sent : 0;
  while (waiting > limits_.waiting_bytes) {
    const auto one = oldest(State::writing);
    waiting -= one->bytes.size() - one->sent;
    connections_.erase(one);
  }
}

void HttpConnections::Impl::read_from(Connection& c) {
  char buffer[8192];
  while (c.state == State::reading) {
    const ssize_t got = ::recv(c.socket.get(), buffer, sizeof buffer, 0);
    if (got < 0 && would_wait()) return;
    if (got <= 0) {  // it ended before its request did
      c.state = State::closed;
      return;
    }
    const size_t seen = c.bytes.size() < 3 ? 0 : c.bytes.size() - 3;
    c.bytes.append(buffer, got);
    if (c.bytes.find("\r\n\r\n", seen) != std::string::npos || c.bytes.size() > kMaxRequestBytes) start_answer(c);
  }
}

void HttpConnections::Impl::start_answer(Connection& c) {
  try {
    c.bytes = answer_(c.bytes);
  } catch (const std::exception&) {  // such as a lack of memory; the next request may have more luck
    c.bytes.clear();
  }
  c.state = State::writing;
  c.deadline = Clock::now() + limits_.answer;
  write_to(c);
}

void HttpConnections::Impl::write_to(Connection& c) {
  while (c.sent < c.bytes.size()) {
    const ssize_t got = ::send(c.socket.get(), c.bytes.data() + c.sent, c.bytes.size() - c.sent, MSG_NOSIGNAL);
    if (got < 0 && would_wait()) return;
    if (got < 0) {
      c.state = State::closed;
      return;
    }
    c.sent += got;
  }
  // A close with unread bytes would reset the connection, and the client could lose the answer.
  ::shutdown(c.socket.get(), SHUT_WR);
  c.state = State::lingering;
  c.deadline = Clock::now() + kLinger;
  c.bytes = std::string();
  drain(c);
}

void HttpConnections::Impl::drain(Connection& c) {
  char buffer[8192];
  const ssize_t got = ::recv(c.socket.get(), buffer, sizeof buffer, 0);
  if (got == 0 || (got < 0 && !would_wait())) c.state = State::closed;
}

HttpConnections::HttpConnections(int port, Answer answer, const Limits& limits)
    : impl_(std::make_unique<Impl>(port, std::move(answer), limits)) {}
HttpConnections::~HttpConnections() = default;
int HttpConnections::port() const { return impl_->port(); }

}  // namespace moebius
