// The connections of one rank to all others, and the messages on them. The rank's thread posts messages and waits for
// them; a thread of this object moves what is on its way while the rank computes.
//
//   Frames    Bytes on a connection are frames: a header, then its payload. A message of at
//             most kEagerBytes is one frame, kept by the receiver until it is asked for. Of a
//             longer one the sender first sends an offer; the receiver accepts when it knows
//             where the bytes go; then they come. So nobody keeps long messages of others.
//   Order     The messages of two ranks on a channel are numbered by each end: the n-th sent is the n-th received.
//   Threads   Everything is guarded by one mutex. While the rank's thread waits it moves the bytes itself, and the
//             other thread stands back.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/liveness/stall_aware_deadline.h"
#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

class TcpLinks;

// One end of a message. All but the first line is guarded by the links' mutex.
struct TcpEnd {
  int peer = 0, channel = 0;
  bool sends = false;
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
  int64_t number = 0;  // of the message on its channel
  enum class State { waiting, ended, mismatched } state = State::waiting;
  int64_t peer_bytes = 0;  // where mismatched
};

class TcpLinks {
 public:
  static constexpr int64_t kEagerBytes = 1 << 16;

  // Of a rank to all others: sockets by rank, none for itself.
  TcpLinks(int rank, std::vector<Socket> sockets);
  ~TcpLinks();
  TcpLinks(const TcpLinks&) = delete;

  int size() const { return static_cast<int>(links_.size()); }
  void post(TcpEnd& end);      // begins to send or receive; end stays where it is until withdrawn
  void withdraw(TcpEnd& end);  // its memory may be used again, whether the message has ended or not

  // What a rank knows of another besides its messages.
  struct Peer {
    enum class State { here, left, lost } state = State::here;  // left: it said so; lost: its connection broke
    std::optional<uint64_t> farewell;                           // that it sent
    std::string failure;                                        // why it ended the run; empty: it did not
  };
  // Moves bytes until done says so, or it has waited for so long (comm/liveness/stall_aware_deadline.h): then false. done sees ends and
  // peers as they are then (it is called with the mutex held) and throws when it sees what cannot end well.
  bool move_until(double seconds, const std::function<bool()>& done);
  const Peer& peer(int rank) const { return links_[rank].peer; }  // REQUIRES: from done

  // To all others, behind what was sent before. They are on their way when this returns, and have left when
  // move_until(.., nothing_to_send) is done.
  void say_farewell(uint64_t hash);
  void say_failure(const std::string& why);
  void say_left();
  bool nothing_to_send() const;  // from done

  // Calls `on_stall` once from the thread of this object when another rank has failed, and this rank's thread has not
  // come to move_until for so long.
  void watch(double stall_s, std::function<void(int failed_rank)> on_stall);

 private:
  enum class Kind : uint32_t { message, offer, accept, body, farewell, failure, left };
  struct Header {
    Kind kind = Kind::message;
    int32_t channel = 0;
    int64_t number = 0;  // of the message; of a farewell its hash
    int64_t num_bytes = 0;
  };
  // On its way out. The payload belongs to the end that sends it, or to the frame itself.
  struct OutFrame {
    Header header;
    const std::byte* payload = nullptr;
    int64_t payload_bytes = 0, sent = 0;  // sent: of header and payload
    TcpEnd* end = nullptr;
    std::vector<std::byte> own;
  };
  // A message that came before its receive: with its bytes, or an offer.
  struct Early {
    Header header;
    std::vector<std::byte> bytes;
  };
  struct Channel {
    int64_t num_sent = 0, num_received = 0;
    std::deque<TcpEnd*> receives;         // whose message has not come
    std::deque<Early> early;              // whose receive has not come; one of both is empty
    std::map<int64_t, TcpEnd*> offered;   // sends, until they are accepted
    std::map<int64_t, TcpEnd*> accepted;  // receives, until their bytes come
  };
  struct Link {
    Socket socket;
    Peer peer;
    std::map<int, Channel> channels;
    std::deque<OutFrame> out;
    // The frame that is coming in.
    Header header;
    int64_t got = 0;             // of header and payload
    std::byte* into = nullptr;   // where the payload goes; null: nowhere
    TcpEnd* receiver = nullptr;  // whose payload it is
    Early* early = nullptr;      // that it is kept in
    std::vector<std::byte> text;
  };

  // All of these with the mutex held.
  void queue(int peer, OutFrame frame);
  void queue_for_all(const Header& header, const std::string& text);
  void post_send(TcpEnd& end);
  void post_receive(TcpEnd& end);
  void take_early(Link& link, Channel& channel, TcpEnd& end);
  void accept_offer(Channel& channel, TcpEnd& end, const Header& offer);
  bool sizes_agree(TcpEnd& end, int64_t peer_bytes);
  void finish(TcpEnd& end, TcpEnd::State state);
  void send_some(Link& link);
  void receive_some(int peer);
  bool receive_once(int peer);
  void begin_payload(int peer);
  void end_payload(int peer);
  void take_offer(int peer);
  void take_accept(int peer);
  void lose(Link& link);
  void pump(std::unique_lock<std::mutex>& lock, int timeout_ms, bool by_rank);
  void run_mover();
  bool nothing_on_its_way() const { return num_open_ == 0 && nothing_to_send(); }
  void look_for_stall(std::unique_lock<std::mutex>& lock);
  void wake_mover();

  const int rank_;
  mutable std::mutex mutex_;
  std::condition_variable parked_;  // where the mover stands back
  std::vector<Link> links_;
  Socket waker_;          // an eventfd, which ends the mover's poll
  int64_t num_open_ = 0;  // ends that wait
  std::chrono::steady_clock::time_point last_post_;
  bool rank_moves_ = false, mover_polls_ = false, mover_naps_ = false, stop_ = false;
  double stall_s_ = 0;
  StallAwareDeadline rank_may_stay_away_{0};  // after another rank has failed
  std::function<void(int)> on_stall_;
  std::thread mover_;
};

}  // namespace moebius
