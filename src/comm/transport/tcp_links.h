// TcpLinks are the connections of one rank to others, with the messages on them.
// The rank's thread posts messages and waits for them. A second thread, the mover, moves bytes
// while the rank computes.
//
//   Star      Each rank begins with a connection to rank 0. The connection of two other ranks is made when one of
//             them posts a message to the other for the first time: the higher one asks for it, the lower one waits.
//   Failures  A rank that ends the run informs the ranks that it is connected to. Rank 0 forwards the first such
//             failure, and the first connection that breaks, to all ranks. Later ones are consequences.
//   Frames    Bytes on a connection are frames: a header, then its payload.
//             A message of at most kEagerBytes is one frame, which the receiver keeps until it is asked for.
//             The sender keeps a copy of such frames until there is a connection, up to kMaxKeptBytes for a rank. So
//             a rank that sends a short message does not wait for the connection to be made.
//             For a longer message the sender first sends an offer. The receiver accepts it when it knows
//             where the bytes go; then they are sent. So no rank keeps long messages of others.
//   Order     Each end numbers the messages of two ranks on a channel: the n-th sent is the n-th received.
//   Threads   One mutex guards everything. While the rank's thread waits it moves the bytes
//             itself, and the mover pauses.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/liveness/stall_aware_deadline.h"
#include "comm/transport/socket.h"
#include "comm/transport/transport.h"

namespace moebius {

class TcpLinks;

// One end of a message. The links' mutex guards all fields but the first two.
struct TcpEnd {
  int peer = 0, channel = 0;
  bool sends = false;
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
  int64_t number = 0;  // number of the message on its channel
  enum class State { waiting, ended, mismatched } state = State::waiting;
  int64_t peer_bytes = 0;  // set when mismatched
};

class TcpLinks {
 public:
  static constexpr int64_t kEagerBytes = 1 << 16, kMaxKeptBytes = 1 << 20;

  // sockets: indexed by rank; closed for ranks without a connection.
  // connect(r): asks for a connection to a lower rank. It returns at once, and add() brings the connection. It is
  // called with the mutex held.
  TcpLinks(int rank, std::vector<Socket> sockets, std::function<void(int rank)> connect = {});
  ~TcpLinks();
  TcpLinks(const TcpLinks&) = delete;

  int size() const { return static_cast<int>(links_.size()); }
  void add(int rank, Socket socket);  // adds a connection that was made; any thread may call it
  bool is_connected(int rank) const;  // whether there is, or was, a connection to this rank
  int num_connections() const;        // connections made so far
  void post(TcpEnd& end);             // starts to send or receive; end must not be moved until it is withdrawn
  void withdraw(TcpEnd& end);         // its memory may then be reused, even if the transfer is not complete

  // The state of another rank, as far as this rank knows it.
  struct Peer {
    enum class State { here, left, lost };  // left: finished normally; lost: its connection broke
    State state = State::here;
    std::optional<uint64_t> own_error;  // at rank 0: the hash of an error of its own, which it sent
    std::string failure;                // why it ended the run; empty if it did not
  };
  // The reply of rank 0 when all ranks have sent an error of their own.
  struct ErrorReply {
    bool is_repeated = false;  // a lower rank has the same error
  };
  // Moves bytes until done() returns true.
  // Returns false when `seconds` pass before that (comm/liveness/stall_aware_deadline.h).
  // done() is called with the mutex held, so it may read ends and peers.
  // It throws when the wait cannot succeed.
  bool move_until(double seconds, const std::function<bool()>& done);
  // These REQUIRE that they are called from done.
  const Peer& peer(int rank) const { return links_[rank].peer; }
  std::optional<int> first_failed() const { return first_failed_; }  // the first known to have failed or broken
  std::optional<ErrorReply> error_reply() const { return error_reply_; }
  bool have_all_left() const { return have_all_left_; }
  bool nothing_to_send() const;

  // These queue a frame, to be sent after all frames queued before it. It has been sent when
  // move_until(.., nothing_to_send) returns true.
  void send_own_error(uint64_t hash);  // to rank 0: this rank failed with an error of its own
  // From rank 0 to one rank: every rank failed with an error of its own.
  void send_error_reply(int rank, ErrorReply reply);
  void send_failure(const std::string& why);  // to all connected ranks: this rank ends the run
  void send_left();                           // to all connected ranks: this rank has finished
  void send_all_left();                       // from rank 0 to all ranks

  // Sends each of these ranks a few bytes. Their machines acknowledge them even if the ranks do not read.
  void probe(std::span<const int> ranks);
  // Returns for how many seconds the machine of a rank has acknowledged none of the bytes sent to it; 0 if it has
  // acknowledged all of them, or answers. REQUIRES: called from done.
  double silent_s(int rank) const;
  // Returns the numeric IP addresses of the two ends of its connection.
  std::pair<std::string, std::string> addresses(int rank) const;

  // Returns measurements of the open connections. A rate is measured over the times since the last call in which more
  // bytes waited to leave, if kEnoughBytes left in them. Else it is measured while this rank waited for the rest of a
  // message, if that shows the rate of the link (is_rate_of_link). Else it is the kernel's own measurement.
  std::vector<LinkMeasurement> measurements();
  static constexpr int64_t kEnoughBytes = 1 << 18;

  // Calls `on_stall` once, from the mover's thread, when another rank has failed and this rank's
  // thread has not called move_until for stall_s seconds since.
  void watch(double stall_s, std::function<void(int failed_rank)> on_stall);

 private:
  enum class Kind : uint32_t {
    message,  // a message of at most kEagerBytes
    offer,    // the offer of a longer message
    accept,   // the acceptance of an offer
    body,     // the bytes of an accepted offer
    own_error,
    error_reply,
    failure,
    lost,  // a connection broke
    left,
    all_left,
    probe  // see probe()
  };
  struct Header {
    Kind kind = Kind::message;
    int32_t channel = 0;  // in a failure and in lost: the rank that it is about
    int64_t number = 0;   // number of the message; in own_error the hash; in error_reply whether it is repeated
    int64_t num_bytes = 0;
  };
  // A frame to send. Its payload belongs to the end that sends it, or to the frame itself.
  struct OutFrame {
    Header header;
    const std::byte* payload = nullptr;
    int64_t payload_bytes = 0, sent = 0;  // sent: bytes of header and payload
    TcpEnd* end = nullptr;
    std::vector<std::byte> own;
  };
  // The time in which the link was the bottleneck: at the sender, while the system's send buffer of the connection
  // was full; at the receiver, while it waited for the rest of a frame.
  struct BusyTime {
    std::optional<std::chrono::steady_clock::time_point> since;  // start of the current busy period, if any
    int64_t bytes_since = 0, bytes = 0;                          // bytes of the current period, and of all ended ones
    double seconds = 0;
  };
  // A message that arrived before its receive was posted: its bytes, or an offer.
  struct UnexpectedMessage {
    Header header;
    std::vector<std::byte> bytes;
  };
  struct Channel {
    int64_t num_sent = 0, num_received = 0;
    std::deque<TcpEnd*> receives;              // receives whose message has not arrived
    std::deque<UnexpectedMessage> unexpected;  // messages without a posted receive; one of the two is always empty
    std::map<int64_t, TcpEnd*> offered;        // sends until they are accepted
    std::map<int64_t, TcpEnd*> accepted;       // receives until their bytes arrive
  };
  struct Link {
    Socket socket;
    bool is_made = false;  // the socket is or was open
    bool is_asked_for = false;
    int64_t kept_bytes = 0;  // copies of messages that wait for the connection
    Peer peer;
    std::map<int, Channel> channels;
    std::deque<OutFrame> out;
    BusyTime full, awaited;  // busy time of sending and of receiving
    BusyTime of_frame;       // busy time of the current incoming frame, while a rank waits for it
    // The frame that is arriving.
    Header header;
    int64_t got = 0;                          // bytes of header and payload so far
    std::byte* into = nullptr;                // where the payload goes; null: it is dropped
    TcpEnd* receiver = nullptr;               // the end that the payload is for
    UnexpectedMessage* unexpected = nullptr;  // where it is kept if no receive is posted
    std::vector<std::byte> text;
  };

  // All of these REQUIRE that the mutex is held.
  void queue(int peer, OutFrame frame);
  void queue_text(int peer, const Header& header, const std::string& text);
  void ask_for(int peer);
  // Notes that a rank has failed or that its connection broke. Rank 0 forwards the first.
  void note_failed(int rank);
  void post_send(TcpEnd& end);
  void post_receive(TcpEnd& end);
  static void own_payload(OutFrame& frame);  // copies the payload, which belonged to an end
  void keep(Link& link, OutFrame& frame);    // the same for a message, which ends by it
  void take_unexpected(Link& link, Channel& channel, TcpEnd& end);
  void accept_offer(Channel& channel, TcpEnd& end, const Header& offer);
  bool sizes_agree(TcpEnd& end, int64_t peer_bytes);
  void finish(TcpEnd& end, TcpEnd::State state);
  void send_some(Link& link);
  static void note_busy(BusyTime& time);
  static void note_awaited_frame(Link& link);
  void receive_some(int peer);
  bool receive_once(int peer);
  void begin_payload(int peer);
  void end_payload(int peer);
  void take_offer(int peer);
  void take_accept(int peer);
  void lose(int peer);
  void pump(std::unique_lock<std::mutex>& lock, int timeout_ms, bool by_rank);
  void run_mover();
  bool nothing_on_its_way() const { return num_open_ == 0 && nothing_to_send(); }
  void look_for_stall(std::unique_lock<std::mutex>& lock);
  static void wake(const Socket& waker);
  void wake_mover();

  const int rank_;
  mutable std::mutex mutex_;
  std::condition_variable parked_;  // the mover waits here while the rank's thread moves bytes
  std::vector<Link> links_;
  std::vector<int> open_;  // ranks whose sockets are open
  const std::function<void(int)> connect_;
  std::optional<int> first_failed_;
  std::optional<ErrorReply> error_reply_;
  bool have_all_left_ = false;
  Socket mover_waker_, rank_waker_;  // eventfds that end the poll of the mover and of the rank's thread
  int64_t num_open_ = 0;             // ends that are waiting
  std::chrono::steady_clock::time_point last_post_;
  bool rank_moves_ = false, mover_polls_ = false, mover_naps_ = false, stop_ = false;
  double stall_s_ = 0;
  StallAwareDeadline rank_may_stay_away_{0};  // starts when another rank has failed
  std::function<void(int)> on_stall_;
  std::thread mover_;
};

}  // namespace moebius
