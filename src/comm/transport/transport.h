// A Transport carries messages between the ranks of a world:
// the part of communication in which threads, MPI and TCP differ. It belongs to one rank. The
// collectives are written once, over messages, in message_group.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/liveness/collective_flight_recorder.h"
#include "comm/liveness/default_timeout.h"

namespace moebius {

// Options of a run of several ranks.
struct WorldOptions {
  // The time for which a rank waits for another before it ends the run. Empty: as default_timeout says.
  std::optional<double> timeout_s;
  DefaultTimeout::Options default_timeout;
  // Returns a rank's coordinates for messages: "tp 1, cp 0, dp 0, pp 0".
  // Without it, messages have only the number.
  std::function<std::string(int world_rank)> coordinates;

  double timeout_before_steps_s() const { return timeout_s.value_or(default_timeout.before_steps_s); }
};

// One end of a message, at the rank that sends or receives it. Destroying one in flight withdraws it.
class Message {
 public:
  virtual ~Message() = default;
};
using Messages = std::vector<std::unique_ptr<Message>>;

// The system's measurement of the connection between this rank and another.
struct LinkMeasurement {
  int peer = 0;
  bool crosses_machines = false;
  double round_trip_s = 0;  // the minimum of the last minutes; 0: unknown
  double bytes_per_s = 0;   // the recent receive rate of one of the two machines; 0: unknown
  // bytes_per_s is the link's rate and not a lower bound: more bytes always waited to be sent, or a rank waited
  // for them.
  bool is_filled = false;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;  // rank in the world
  virtual int size() const = 0;

  // Messages between two ranks on one channel arrive in the order of their sends.
  // Both ends must name the same size, which may be 0; else Error{distributed}.
  // The memory is in use until wait().
  virtual std::unique_ptr<Message> send(int to_rank, int channel, const void* data, int64_t num_bytes) = 0;
  virtual std::unique_ptr<Message> recv(int from_rank, int channel, void* data, int64_t num_bytes) = 0;
  // Returns when all messages have ended.
  // Throws Error{distributed} when that takes longer than the timeout, or when another rank failed.
  // record: the collective that they are for, in recorder().
  virtual void wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) = 0;
  void wait(const Messages& messages, int64_t record) { wait(std::span(messages), record); }
  // For waits that are not for messages, such as those for a GPU that waits for other ranks.
  // check() throws Error{distributed} once another rank is known to have failed. timeout_s() is for these too.
  virtual void check() {}
  virtual const WorldOptions& options() const;
  // Returns how long this rank currently waits for another before it ends the run.
  double timeout_s() const { return options().timeout_s.value_or(default_timeout_.seconds(options().default_timeout)); }
  DefaultTimeout& default_timeout() { return default_timeout_; }

  // Returns a measurement of each connection of this rank; none where the transport cannot measure (threads, MPI).
  virtual std::vector<LinkMeasurement> links() { return {}; }

  CollectiveFlightRecorder& recorder() { return recorder_; }
  // Makes a group of world ranks, ascending, which include this one. Nothing is sent.
  // Every rank of the world makes the same number of groups in the same order, and so they agree on
  // the channels. node: the ranks of the group on a node, by which its sums go in levels
  // (comm/collective_levels.h).
  std::unique_ptr<Group> make_group(std::string name, std::vector<int> world_ranks, int node = 8);

 private:
  CollectiveFlightRecorder recorder_;
  DefaultTimeout default_timeout_;
  int num_channels_ = 0;
};

// Makes the world of one rank.
std::unique_ptr<Transport> make_self_transport();
// Makes one rank of a dry-run world, for the null device. Sending is Error{internal}.
std::unique_ptr<Transport> make_dry_run_transport(int rank, int size);

// The work of one rank of a world, on a thread or in a process of its own.
using RankBody = std::function<void(Transport&)>;

// Returns a string such as "rank 3 (tp 1, cp 0, dp 0, pp 0)"
std::string name_of_rank(const WorldOptions& options, int world_rank);
// Returns a string such as "rank 1 (...), rank 2 (...)"
std::string names_of_ranks(const WorldOptions& options, std::span<const int> world_ranks);

}  // namespace moebius
