// An HTTP server that idle peers cannot block. Each connection has a thread, and their number is bounded. A new
// connection takes the place of the one that has waited longest for its peer.
#pragma once

#include <httplib.h>

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

namespace moebius {

// The connections that are open, for their threads and for the thread that accepts.
class HttpConnections {
 public:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    socket_t socket;
    Clock::time_point waits_since;
  };

  // Waits until fewer than kMost threads run, and counts one more. If there are as many, it shuts down the connection
  // that has waited for the longest time.
  void begin_thread();
  void end_thread();
  // Adds a connection, which is shut down at once after close_all().
  std::list<Connection>::iterator add(socket_t socket);
  void remove(std::list<Connection>::iterator connection);
  void touch(std::list<Connection>::iterator connection);
  // Shuts all connections down, also later ones, and waits until no thread runs.
  void close_all();

  static constexpr int kMost = 64;  // a browser opens six

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Connection> connections_;
  int num_threads_ = 0;
  bool is_closed_ = false;
};

class HttpServer final : public httplib::Server {
 public:
  // A request, from its first byte that is waited for to its last, may take kRequestTime. So may each wait for a peer that
  // does not read the answer.
  static constexpr std::chrono::seconds kRequestTime{5};

  HttpServer();
  // Lets more peers wait to be accepted than the library's five. REQUIRES: bound.
  void lengthen_queue();

 private:
  bool process_and_close_socket(socket_t socket) override;

  HttpConnections connections_;
};

}  // namespace moebius
