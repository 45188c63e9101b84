// Connections between the processes of a job are made here: each end proves to the other that it
// knows the job's secret (comm/transport/job_secret.h), and a stranger is closed.
//
//   connector -> acceptor   a greeting: who it is, and a number that it drew for this connection
//   acceptor -> connector   a challenge: who it is, its own number, and its proof over all of this
//   connector -> acceptor   an answer: its proof over all of this
//   acceptor -> connector   one byte: it is let in
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
  int port = 0;      // where it listens; 0: nowhere
  std::string host;  // where it asks to be reached; empty: where its connections come from
};

// The end that connects, which proves the secret to the rank that should be at the other end, and checks its proof.
class Joining {
 public:
  Joining(const Job& job, const RankGreeting& mine, int to_rank);
  ~Joining();
  Joining(Joining&&) noexcept;
  Joining& operator=(Joining&&) noexcept;

  void greet(const Socket& connection);
  // Answers what has come, and does not wait. Returns whether this rank was let in.
  // Error{distributed} when another program is there, a rank of another job, or the other end is gone.
  bool is_let_in(const Socket& connection);
  // Returns whether the other end has proved itself and the answer was sent: then the other end alone decides.
  bool has_answered() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Joins, and waits for it. Error{distributed} as of Joining, or when nobody answers in time.
void join_job(const Socket& connection, const Job& job, const RankGreeting& mine, int to_rank, Deadline deadline);

// Lets in the connections that come to a listener. Strangers are looked after at the same time, so
// that none of them holds up a rank: silent ones, those that send something else, and those that
// do not know the secret.
class Admission {
 public:
  struct Member {
    Socket socket;
    RankGreeting greeting;
  };
  static constexpr double kStrangerS = 5;        // time in which a connection must prove the secret
  static constexpr size_t kMostStrangers = 256;  // connections that have proved nothing yet; each is an open file

  // warn: gets a line for each of the first connections that are refused.
  // expected: ranks that may come at once; beside them it keeps at most kMostStrangers.
  Admission(Socket listener, Job job, int rank, std::function<void(const std::string&)> warn = {}, int expected = 0);
  ~Admission();
  Admission(const Admission&) = delete;

  // Returns the next that has proved the secret; nothing when none had before the deadline.
  std::optional<Member> next(Deadline deadline);
  // The parts of next(), for one who polls more. Appends what is to be polled, and returns when look() is due
  // though nothing came.
  Deadline add_polled(std::vector<pollfd>& polled) const;
  // Takes what add_polled appended, polled. Returns one that has proved the secret; others are found by the next look.
  std::optional<Member> look(std::span<const pollfd> polled);
  const Socket& listener() const { return listener_; }
  // The connections that were refused: "; refused: 10.0.0.7, which ..."; empty without any.
  std::string refused_text() const;

 private:
  struct Visitor;
  void accept_one();
  // Reads what has come. Returns whether the visitor has proved the secret.
  // Throws Error{distributed} when it is a stranger.
  bool has_proved(Visitor& v) const;
  void challenge(Visitor& v) const;
  // Returns the first visitor that has proved the secret, and closes those that are strangers.
  std::optional<Member> look_at_visitors(const std::vector<bool>& has_news);
  void refuse(const Visitor& v, const std::string& why);

  const Socket listener_;  // where visitors come
  const Job job_;
  const int rank_;
  const std::function<void(const std::string&)> warn_;
  const size_t most_visitors_;
  std::vector<Visitor> visitors_;  // the oldest first
  std::vector<std::string> refused_;
  int64_t num_refused_ = 0;
};

}  // namespace moebius
