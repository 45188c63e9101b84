// The handshake of a new connection between two processes of a job. Each end proves to the other that it knows the
// job's secret (comm/transport/job_secret.h). A connection whose other end cannot prove it is closed.
//
//   connector -> acceptor   a greeting: who it is, and a number that it drew for this connection
//   acceptor -> connector   a challenge: who it is, its own number, and its proof over all of this
//   connector -> acceptor   an answer: its proof over all of this
//   acceptor -> connector   one byte: the connection is accepted
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/transport/job_secret.h"
#include "comm/transport/socket.h"

namespace moebius {

// Both ends must have the same.
struct Job {
  std::string secret;
  std::string run;  // distinguishes the run from others at the same ports
};

// Sent by a rank that connects.
struct RankGreeting {
  int rank = 0, size = 0;
  int port = 0;      // port at which it listens; 0: none
  std::string host;  // address that it advertises; empty: the source address of its connection
};

// The connecting end of a handshake. It proves the secret to the rank that should be at the other end, and checks that
// rank's proof.
class HandshakeConnector {
 public:
  HandshakeConnector(const Job& job, const RankGreeting& mine, int to_rank);
  ~HandshakeConnector();
  HandshakeConnector(HandshakeConnector&&) noexcept;
  HandshakeConnector& operator=(HandshakeConnector&&) noexcept;

  void greet(const Socket& connection);
  // Handles the messages that have arrived, and does not wait. Returns whether the peer has accepted this rank.
  // Throws Error{distributed} if the peer is another program or a rank of another job, or has
  // closed the connection.
  bool is_accepted(const Socket& connection);
  // Returns whether the peer has proved the secret and the answer was sent. Only the acceptance is then missing.
  bool has_answered() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Runs the connecting end of a handshake, and waits for its end. Throws Error{distributed} as is_accepted() does, or
// when no answer arrives before the deadline.
void complete_handshake(const Socket& connection, const Job& job, const RankGreeting& mine, int to_rank,
                        Deadline deadline);

// The accepting end: runs the handshakes of all connections to a listener at the same time. So no rank waits for a
// connection that sends nothing, sends something else, or does not know the secret.
class HandshakeAcceptor {
 public:
  struct Member {
    Socket socket;
    RankGreeting greeting;
  };
  static constexpr double kHandshakeTimeoutS = 5;  // time in which a connection must prove the secret
  static constexpr size_t kMaxPending = 256;       // unauthenticated connections; each is an open file

  // warn: called with a line for each of the first connections that are refused.
  // expected: the number of ranks that may connect at once. At most kMaxPending more connections are kept pending.
  HandshakeAcceptor(Socket listener, Job job, int rank, std::function<void(const std::string&)> warn = {},
                    int expected = 0);
  ~HandshakeAcceptor();
  HandshakeAcceptor(const HandshakeAcceptor&) = delete;

  // Returns the next connection that has proved the secret, or nothing if none has before the deadline.
  std::optional<Member> next(Deadline deadline);
  // The next two functions are the parts of next(), for a caller that polls other descriptors too. This one appends the
  // descriptors to poll. It returns the time at which handle_polled() must be called even if nothing arrives.
  Deadline add_polled(std::vector<pollfd>& polled) const;
  // polled: the descriptors that add_polled appended, after poll(). Returns one connection that has proved the secret;
  // the next call returns others.
  std::optional<Member> handle_polled(std::span<const pollfd> polled);
  const Socket& listener() const { return listener_; }
  // Returns the connections that were refused: "; refused: 10.0.0.7, which ..."; empty without any.
  std::string refused_text() const;

 private:
  struct PendingConnection;
  void accept_one();
  // Reads the bytes that have arrived. Returns whether the connection has proved the secret.
  // Throws Error{distributed} if it sent anything that a rank of this job would not send.
  bool has_proved(PendingConnection& v) const;
  void challenge(PendingConnection& v) const;
  // Returns the first connection that has proved the secret, and closes those that failed or ran out of time.
  std::optional<Member> handle_pending(const std::vector<bool>& has_news);
  void refuse(const PendingConnection& v, const std::string& why);

  const Socket listener_;
  const Job job_;
  const int rank_;
  const std::function<void(const std::string&)> warn_;
  const size_t max_pending_;
  std::vector<PendingConnection> pending_;  // the oldest first
  std::vector<std::string> refused_;
  int64_t num_refused_ = 0;
};

}  // namespace moebius
