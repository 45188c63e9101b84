#include "report/http_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace moebius {
namespace {

using Clock = HttpConnections::Clock;

// Returns whether the socket has one of the events by then.
bool wait_for(socket_t socket, short events, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd ready{.fd = socket, .events = events};
    const int got = ::poll(&ready, 1, static_cast<int>(std::max<int64_t>(left, 0)));
    if (got > 0) return true;
    if (got == 0 || errno != EINTR) return false;
  }
}

// The bytes of a connection. The library reads them one by one, and waits for each as long as a request may take.
class PeerStream final : public httplib::Stream {
 public:
  explicit PeerStream(socket_t socket) : socket_(socket) {}

  // Waits for the first byte of a request.
  bool begin_request() {
    until_ = Clock::now() + HttpServer::kRequestTime;
    return is_readable();
  }

  bool is_readable() const override { return at_ < size_ || wait_for(socket_, POLLIN, until_); }
  bool is_writable() const override { return wait_for(socket_, POLLOUT, Clock::now() + HttpServer::kRequestTime); }
  ssize_t read(char* to, size_t size) override {
    if (at_ == size_) {
      if (!is_readable()) return -1;
      const ssize_t got = ::recv(socket_, buffer_, sizeof buffer_, 0);
      if (got <= 0) return got;
      at_ = 0;
      size_ = static_cast<size_t>(got);
    }
    const size_t count = std::min(size, size_ - at_);
    std::memcpy(to, buffer_ + at_, count);
    at_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* from, size_t size) override {
    return is_writable() ? ::send(socket_, from, size, MSG_NOSIGNAL | MSG_DONTWAIT) : -1;
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { name(ip, port); }
  void get_local_ip_and_port(std::string& ip, int& port) const override { name(ip, port); }
  socket_t socket() const override { return socket_; }

 private:
  // Nothing asks for names, which would be those of this machine.
  static void name(std::string& ip, int& port) {
    ip = "127.0.0.1";
    port = 0;
  }

  socket_t socket_;
  Clock::time_point until_;
  char buffer_[4096];
  size_t at_ = 0, size_ = 0;
};

// Gives each connection a thread of its own.
class ThreadEach final : public httplib::TaskQueue {
 public:
  explicit ThreadEach(HttpConnections& connections) : connections_(connections) {}

  void enqueue(std::function<void()> serve) override {
    connections_.begin_thread();
    try {
      std::thread([&connections = connections_, serve = std::move(serve)] {
        serve();
        connections.end_thread();
      }).detach();
    } catch (const std::system_error&) {  // no thread can be had: this one serves
      serve();
      connections_.end_thread();
    }
  }
  void shutdown() override { connections_.close_all(); }

 private:
  HttpConnections& connections_;
};

}  // namespace

void HttpConnections::begin_thread() {
  std::unique_lock lock(mutex_);
  while (num_threads_ >= kMost && !is_closed_) {
    const auto oldest = std::ranges::min_element(connections_, {}, &Connection::waits_since);
    if (oldest != connections_.end()) ::shutdown(oldest->socket, SHUT_RDWR);
    const int before = num_threads_;
    changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return num_threads_ < before; });
  }
  ++num_threads_;
}

void HttpConnections::end_thread() {
  const std::lock_guard lock(mutex_);
  --num_threads_;
  changed_.notify_all();
}

std::list<HttpConnections::Connection>::iterator HttpConnections::add(socket_t socket) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) ::shutdown(socket, SHUT_RDWR);
  return connections_.insert(connections_.end(), {.socket = socket, .waits_since = Clock::now()});
}

void HttpConnections::remove(std::list<Connection>::iterator connection) {
  const std::lock_guard lock(mutex_);
  connections_.erase(connection);
}

void HttpConnections::touch(std::list<Connection>::iterator connection) {
  const std::lock_guard lock(mutex_);
  connection->waits_since = Clock::now();
}

void HttpConnections::close_all() {
  std::unique_lock lock(mutex_);
  is_closed_ = true;
  for (const Connection& each : connections_) ::shutdown(each.socket, SHUT_RDWR);
  changed_.wait(lock, [&] { return num_threads_ == 0; });
}

HttpServer::HttpServer() {
  new_task_queue = [this] { return new ThreadEach(connections_); };
}

void HttpServer::lengthen_queue() {
  // A socket that listens takes a new length.
  ::listen(svr_sock_, SOMAXCONN);
}

bool HttpServer::process_and_close_socket(socket_t socket) {
  const auto connection = connections_.add(socket);
  PeerStream stream(socket);
  bool is_served = false, is_closed = false;
  for (size_t left = keep_alive_max_count_; left > 0 && !is_closed && stream.begin_request(); --left) {
    is_served = process_request(stream, /*close_connection=*/left == 1, is_closed, nullptr);
    if (!is_served) break;
    connections_.touch(connection);
  }
  connections_.remove(connection);
  ::shutdown(socket, SHUT_RDWR);
  ::close(socket);
  return is_served;
}

}  // namespace moebius
