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
#include "comm/socket.h"

namespace moebius {

class RankWatch {
 public:
  // On every rank of the world, which meet for it over `control`; once they have, it takes them about `seconds` at
  // most. on_death gets the rank whose process has ended, once at most, on the thread of this object.
  RankWatch(Control& control, double seconds, std::function<void(int rank)> on_death);
  // REQUIRES: say_goodbye or say_ending was called, or this rank is to be taken for dead.
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;

  // Empty: all ranks are connected. Else why they could not be, the same on all of them: then nothing is watched.
  const std::string& why_missing() const { return why_missing_; }

  void say_goodbye();  // this rank is through with its work, as all are
  void say_ending();   // this rank ends the processes of all

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
  void run();
  void receive(Link& link);
  void hear(const Notice& notice, const Link& from);
  void send(const Notice& notice, const Link* except = nullptr);
  void wake();

  int rank_ = 0;
  std::string why_missing_;
  std::function<void(int)> on_death_;
  std::vector<Link> links_;
  Socket waker_;  // an eventfd
  std::atomic<bool> quiet_ = false, stop_ = false;
  std::thread watcher_;
};

}  // namespace moebius
