// A LinkMaker makes the connections of a rank that were not made at the start, on a separate thread. The higher of two
// ranks makes their connection at its first use, so that two ranks never make two. The thread accepts connections
// (comm/transport/handshake.h) and makes others at the same time. So neither unauthenticated connections nor a rank
// that does not answer delay another.
//
//   Retries   An attempt that fails is repeated until the rank leaves. The LinkMaker itself never fails: a rank that
//             waits for the connection ends the run after its timeout, and why_not() returns the reason.
//   Names     A host name is resolved on another thread, so that an unreachable name server delays only this call.
//   Silence   If a rank does not answer a greeting within answer_s, a new connection replaces this one. The rank may be
//             stopped: when it continues, it accepts the newest connection, and warns of the older, closed ones. Or
//             the link was interrupted, and the peer has closed the connection.
//   Closing   The listener is closed when all higher ranks have connected.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport/handshake.h"
#include "comm/transport/name_lookup.h"
#include "comm/transport/socket.h"

namespace moebius {

class LinkMaker {
 public:
  struct Options {
    int rank = 0, size = 1;
    Job job;
    Socket listener;                               // accepts connections of higher ranks; closed: there are none
    std::vector<HostPort> places;                  // indexed by rank: the address at which it listens
    std::function<void(const std::string&)> warn;  // as that of HandshakeAcceptor
    // Called with each new connection, on the thread of this object.
    std::function<void(int rank, Socket)> made;
    LookUp look_up = nullptr;  // null: the system resolver
    double look_up_s = 5;      // time after which why_not() reports an unresolved name
    double answer_s = 20;      // time in which a rank answers a greeting
  };
  explicit LinkMaker(Options options);
  ~LinkMaker() = default;  // afterwards no connection is made
  LinkMaker(const LinkMaker&) = delete;

  // Connects to a lower rank, and returns at once. It is called once for each rank.
  void call(int rank);
  // Returns why there is no connection yet to a lower rank passed to call(), with its address:
  // "10.0.0.3:4000: Connection refused". Empty for another rank.
  std::string why_not(int rank) const;

 private:
  // A connection that is being made. Between two attempts the socket is closed.
  struct Call {
    int rank = 0, attempt = 0;
    Deadline due;  // when the next attempt begins, or when this one has taken too long to connect or to be answered
    std::optional<NameLookup> name;  // lookup of the attempt that begins
    Deadline name_due;
    Socket socket;
    std::optional<HandshakeConnector> handshake;  // set once the socket is connected
  };
  void run(const std::stop_token& stop);
  void take_new_calls();
  void admit(std::span<const pollfd> polled);
  void accept(HandshakeAcceptor::Member member);
  void advance_all(std::span<const pollfd> polled);
  // Continues a call. Returns whether the connection was made.
  bool advance(Call& call, bool has_news);
  void begin_attempt(Call& call);
  void greet(Call& call);
  void set_why_not(int rank, const std::string& why);
  void wake();

  const int rank_, size_;
  const Job job_;
  const std::vector<HostPort> places_;
  const std::function<void(const std::string&)> warn_;
  const std::function<void(int, Socket)> made_;
  const LookUp look_up_;
  const double look_up_s_, answer_s_;
  const Socket waker_;                         // an eventfd
  std::optional<HandshakeAcceptor> acceptor_;  // empty: no higher rank is left to connect
  std::vector<bool> is_connected_;             // by rank
  int num_awaited_ = 0;                        // higher ranks that have not connected yet
  std::vector<Call> calls_;
  mutable std::mutex mutex_;  // guards the next two
  std::vector<int> new_calls_;
  std::map<int, std::string> why_not_;
  std::jthread thread_;  // the last member, since it uses the others
};

}  // namespace moebius
