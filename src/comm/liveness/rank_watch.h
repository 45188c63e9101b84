// Tells a rank at once that the process of another one has ended, where the transport between them does not (MPI):
// sockets beside it, on which nothing is said as long as all is well.
//
//   Tree   Rank r is connected to (r - 1) / 2, 2 r + 1 and 2 r + 2: three connections at most.
//   Ends   A process that dies says no goodbye on its connections. Who sees that tells its other neighbours, they
//          tell theirs. The first news ends the watch: what comes later is the end of the run, not its reason.
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
    std::function<void(int rank)> death;   // the process of this rank has ended
    std::function<void()> ending = [] {};  // another rank ends the processes of all
  };
  // On every rank of the world, which meet for it over `control`; once they have, it takes them about `seconds` at
  // most. One of the listener's is called, once at most, on the thread of this object.
  RankWatch(Control& control, double seconds, Listener listener);
  // REQUIRES: say_goodbye or say_ending was called, or this rank is to be taken for dead.
  ~RankWatch() = default;
  RankWatch(const RankWatch&) = delete;

  // Empty: all ranks are connected. Else why they could not be, the same on all of them: then nothing is watched.
  const std::string& why_missing() const { return why_missing_; }

  void say_goodbye();  // this rank is through with its work, as all are
  // This rank ends the processes of all. Not at once: one that ended before it has handed this on would be taken for
  // dead by those that did not get it.
  void say_ending();

 private:
  enum class News : int32_t { goodbye, death, ending };
  struct Notice {
    News news = News::goodbye;
    int32_t rank = 0;
  };
  struct Link {
    int rank = 0;
    Socket socket;
    std::array<std::byte, sizeof(Notice)> bytes{};  // of a notice that is coming
    size_t num_bytes = 0;
    bool is_through = false;  // nothing more is to come
  };
  void connect(Control& control, double seconds);
  void run(const std::stop_token& stop);
  void receive(Link& link);
  void hear(const Notice& notice, const Link& from);
  void send(const Notice& notice, const Link* except = nullptr);
  void wake();

  int rank_ = 0;
  std::string why_missing_;
  Listener listener_;
  std::vector<Link> links_;
  Socket waker_;                                       // an eventfd
  std::atomic<bool> watches_ = false, quiet_ = false;  // links_ is complete; nothing is news any more
  std::jthread watcher_;                               // the last: it uses the others
};

}  // namespace moebius
