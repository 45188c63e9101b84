// Connections between the processes of a job are made here: each end proves to the other that it
// knows the job's secret (comm/transport/job_secret.h), and a stranger is closed.
//
//   connector -> acceptor   a greeting: who it is, and a number that it drew for this connection
//   acceptor -> connector   a challenge: who it is, its own number, and its proof over all of this
//   connector -> acceptor   an answer: its proof over all of this
//   acceptor -> connector   one byte: it is let in
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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

// Proves the secret to the rank that should be at the other end, and checks its proof.
// Error{distributed} when another program is there, a rank of another job, or nobody answers in time.
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
  static constexpr double kStrangerS = 5;  // time in which a connection must prove the secret

  // warn: gets a line for each of the first connections that are refused.
  Admission(Socket listener, Job job, int rank, std::function<void(const std::string&)> warn = {});
  ~Admission();
  Admission(const Admission&) = delete;

  // Returns the next that has proved the secret; nothing when none had before the deadline.
  std::optional<Member> next(Deadline deadline);
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
  std::vector<Visitor> visitors_;  // the oldest first
  std::vector<std::string> refused_;
  int64_t num_refused_ = 0;
};

}  // namespace moebius
