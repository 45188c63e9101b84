// A RankWatch reports at once that the process of another rank has ended, where the transport does
// not do so (MPI).
// It has sockets of its own, separate from the transport; they carry nothing while every rank is alive.
//
//   Tree   Rank r is connected to (r - 1) / 2, 2 r + 1 and 2 r + 2: three connections at most.
//   Ends   A process that dies sends no exit notice on its connections. A rank that detects this notifies its other
//          neighbours, and they theirs. The first notice ends the watch, since later ends are consequences.
//   Entry  A connection proves a secret that rank 0 draws and `control` carries (comm/transport/handshake.h).
//   Cost   A thread that sleeps.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/control.h"
#include "comm/transport/socket.h"

namespace moebius {

class RankWatch {
 public:
  struct Listener {
    std::function<void(int rank)> death;   // called when the process of rank `rank` has ended
    std::function<void()> ending = [] {};  // called when another rank ends the processes of all ranks
  };
  // Every rank of the world makes one; they exchange their addresses over `control`.
  // Connecting then takes at most about `seconds`.
  // At most one of the listener's functions is called, once, on this object's thread.
  RankWatch(Control& control, double seconds, Listener listener);
  // REQUIRES: announce_exit or announce_abort was called. Otherwise the other ranks report this rank as dead.
  ~RankWatch() = default;
  RankWatch(const RankWatch&) = delete;

  // Returns an empty string when all ranks are connected. Else it returns the reason, the same on all
  // ranks, and nothing is watched.
  const std::string& why_missing() const { return why_missing_; }

  void announce_exit();  // this rank has ended its work, as all ranks have
  // This rank ends the processes of all ranks, but not at once. If a rank ended before it had forwarded this notice,
  // the ranks that did not get it would report that rank as dead.
  void announce_abort();

 private:
  enum class Event : int32_t { exit, death, abort };
  struct Notice {
    Event event = Event::exit;
    int32_t rank = 0;
  };
  struct Link {
    int rank = 0;
    Socket socket;
    std::array<std::byte, sizeof(Notice)> bytes{};  // the notice that is being received
    size_t num_bytes = 0;
    bool is_closed = false;  // the peer has closed it
  };
  void connect(Control& control, double seconds);
  void run(const std::stop_token& stop);
  void receive(Link& link);
  void handle_notice(const Notice& notice, const Link& from);
  void send(const Notice& notice, const Link* except = nullptr);
  void wake();

  int rank_ = 0;
  std::string why_missing_;
  Listener listener_;
  std::vector<Link> links_;
  Socket waker_;                                       // an eventfd
  std::atomic<bool> watches_ = false, quiet_ = false;  // links_ is complete; later events are ignored
  std::jthread watcher_;                               // the last member, since it uses the others
};

}  // namespace moebius
