// How messages reach the ranks of a world: the part of communication that threads, MPI and TCP do differently. A
// Transport belongs to one rank. What the collectives are is said once, over messages, in message_group.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/liveness/collective_flight_recorder.h"

namespace moebius {

// What a run of several ranks is told.
struct WorldOptions {
  double timeout_s = 600;  // for which a rank waits for another before it ends the run
  // Where a rank stands, for messages: "tp 1, cp 0, dp 0, pp 0". None: the rank's number says all.
  std::function<std::string(int world_rank)> coordinates;
};

// The end of a message at one rank. Destroying one that is on its way withdraws it.
class Message {
 public:
  virtual ~Message() = default;
};
using Messages = std::vector<std::unique_ptr<Message>>;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;  // in the world
  virtual int size() const = 0;

  // Messages between two ranks on one channel arrive in the order of their sends. Both ends name the same size, which
  // may be 0, else Error{distributed}. The memory is in use until wait().
  virtual std::unique_ptr<Message> send(int to_rank, int channel, const void* data, int64_t num_bytes) = 0;
  virtual std::unique_ptr<Message> recv(int from_rank, int channel, void* data, int64_t num_bytes) = 0;
  // Returns when all of them have ended. Error{distributed} when that takes longer than the timeout, or another rank
  // failed. record: the collective that they are for, in ring().
  virtual void wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) = 0;
  void wait(const Messages& messages, int64_t record) { wait(std::span(messages), record); }
  // For who waits for something else than messages, a GPU that waits for other ranks: Error{distributed} once another
  // rank is known to have failed, and for how long a rank may be waited for.
  virtual void check() {}
  virtual const WorldOptions& options() const;

  CollectiveFlightRecorder& ring() { return ring_; }
  // A group of ranks of the world, ascending, this one among them. Nothing is sent: every rank of the world makes as
  // many groups in the same order, each its own, and so they agree on the channels.
  std::unique_ptr<Group> make_group(std::string name, std::vector<int> world_ranks);

 private:
  CollectiveFlightRecorder ring_;
  int num_channels_ = 0;
};

// The world of one rank.
std::unique_ptr<Transport> make_self_transport();
// A rank of a world that exists on paper only, for what runs on the null device. Nothing may be sent: Error{internal}.
std::unique_ptr<Transport> make_dry_run_transport(int rank, int size);

// What a rank of a world does, on a thread or in a process of its own.
using RankBody = std::function<void(Transport&)>;

// "rank 3 (tp 1, cp 0, dp 0, pp 0)"
std::string name_of_rank(const WorldOptions& options, int world_rank);
// "rank 1 (...), rank 2 (...)"
std::string names_of_ranks(const WorldOptions& options, std::span<const int> world_ranks);

}  // namespace moebius
