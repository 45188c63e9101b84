#include "comm/transport/threads.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <tuple>

#include "comm/liveness/rank_failure.h"

namespace moebius {
namespace {

using Clock = std::chrono::steady_clock;

// One end of a message. The world's mutex guards the fields after the dashes.
struct End {
  int owner = 0, peer = 0, channel = 0;
  bool sends = false;
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
  // --
  enum class State { waiting, copying, ended, mismatched } state = State::waiting;
  int64_t peer_bytes = 0;  // set when mismatched
};

// The state that all threads share.
class World {
 public:
  World(int num_ranks, const WorldOptions& options) : options_(options), ranks_(num_ranks) {}

  int size() const { return static_cast<int>(ranks_.size()); }
  const WorldOptions& options() const { return options_; }
  void post(End& end);
  void withdraw(End& end);
  void wait(int rank, std::span<End* const> ends, const CollectiveRecord& record, double timeout_s);
  void check(int rank, const CollectiveRecord& record);
  void begin_rank(int rank, CollectiveFlightRecorder& recorder);
  void end_rank(int rank);  // called on a thread that leaves body without an exception
  void fail(int rank, std::exception_ptr error, RankFailure failure);
  void rethrow_failure() const;

 private:
  struct Rank {
    std::condition_variable news;
    CollectiveFlightRecorder* recorder = nullptr;  // while body runs
    std::span<End* const> ends;                    // the ends that it waits for
    const CollectiveRecord* record = nullptr;      // set while it waits
    bool ended = false;
    std::optional<RankFailure> failure;
  };
  // Shows the other ranks what this one waits for, during its lifetime.
  struct Waiting {
    Waiting(Rank& r, std::span<End* const> ends, const CollectiveRecord& record) : self(r) {
      self.ends = ends;
      self.record = &record;
    }
    ~Waiting() {
      self.ends = {};
      self.record = nullptr;
    }
    Rank& self;
  };
  struct Failure {
    std::exception_ptr error;
    std::string text;  // for the other ranks
  };

  // All of these REQUIRE that the mutex is held.
  std::vector<int> peers_missing(int rank) const;
  std::vector<int> ranks_to_blame(int rank) const;
  bool waits_for_ended(int rank) const;
  bool waits_for_workers(int rank) const;
  void check_sizes(int rank) const;
  std::string doing(int rank) const;
  [[noreturn]] void fail_waiting(int rank, const std::string& why);
  [[noreturn]] void fail_because_of_other(int rank, const CollectiveRecord& record) const;
  void wake_all();

  const WorldOptions options_;
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  std::map<std::tuple<int, int, int>, std::deque<End*>> unmatched_;  // by from, to, channel; all sends or all receives
  std::optional<Failure> failure_;                                   // the first one
};

std::tuple<int, int, int> lane_of(const End& end) {
  return {end.sends ? end.owner : end.peer, end.sends ? end.peer : end.owner, end.channel};
}

void World::post(End& end) {
  std::unique_lock lock(mutex_);
  std::deque<End*>& lane = unmatched_[lane_of(end)];
  if (lane.empty() || lane.front()->sends == end.sends) {
    lane.push_back(&end);
    return;
  }
  End& other = *lane.front();
  lane.pop_front();
  if (end.num_bytes == other.num_bytes) {
    end.state = other.state = End::State::copying;
    lock.unlock();
    const End &from = end.sends ? end : other, &to = end.sends ? other : end;
    if (end.num_bytes > 0) std::memcpy(to.data, from.data, end.num_bytes);
    lock.lock();
    end.state = other.state = End::State::ended;
  } else {
    end.state = other.state = End::State::mismatched;
    end.peer_bytes = other.num_bytes;
    other.peer_bytes = end.num_bytes;
  }
  ranks_[other.owner].news.notify_one();
}

void World::withdraw(End& end) {
  std::unique_lock lock(mutex_);
  if (end.state == End::State::waiting) std::erase(unmatched_[lane_of(end)], &end);
  ranks_[end.owner].news.wait(lock, [&] { return end.state != End::State::copying; });
}

// --- waiting --------------------------------------------------------------------------------------------------------

void World::wait(int rank, std::span<End* const> ends, const CollectiveRecord& record, double timeout_s) {
  const auto until =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  std::unique_lock lock(mutex_);
  Rank& self = ranks_[rank];
  const Waiting waiting(self, ends, record);
  const auto is_over = [&] {
    check_sizes(rank);
    if (peers_missing(rank).empty()) return true;
    if (failure_ && waits_for_workers(rank)) return false;
    if (failure_) fail_because_of_other(rank, record);
    if (waits_for_ended(rank)) fail_waiting(rank, "waits for a rank that has ended its work");
    return false;
  };
  if (self.news.wait_until(lock, until, is_over)) return;
  if (failure_) fail_because_of_other(rank, record);
  fail_waiting(rank, fmt::format("has waited for {} s", timeout_s));
}

std::vector<int> World::peers_missing(int rank) const {
  std::vector<int> missing;
  for (const End* end : ranks_[rank].ends) {
    const bool open = end->state == End::State::waiting || end->state == End::State::copying;
    if (open && std::find(missing.begin(), missing.end(), end->peer) == missing.end()) missing.push_back(end->peer);
  }
  std::sort(missing.begin(), missing.end());
  return missing;
}

bool World::waits_for_ended(int rank) const {
  return std::any_of(ranks_[rank].ends.begin(), ranks_[rank].ends.end(),
                     [&](const End* end) { return end->state == End::State::waiting && ranks_[end->peer].ended; });
}

// Returns whether, after a failure, the ranks that this one waits for neither failed nor wait.
// They may be about to join and then to fail as the first one did, and this rank with them.
bool World::waits_for_workers(int rank) const {
  const std::vector<int> missing = peers_missing(rank);
  return std::none_of(missing.begin(), missing.end(), [&](int peer) {
    return ranks_[peer].ended || ranks_[peer].failure || !peers_missing(peer).empty();
  });
}

void World::check_sizes(int rank) const {
  for (const End* end : ranks_[rank].ends) {
    MOEBIUS_CHECK(distributed, end->state != End::State::mismatched,
                  "{}: {} {} {} bytes {} {}, which has {}; the ranks disagree about a shape or count",
                  to_string(*ranks_[rank].record), name_of_rank(options_, rank), end->sends ? "sends" : "expects",
                  end->num_bytes, end->sends ? "to" : "from", name_of_rank(options_, end->peer), end->peer_bytes);
  }
}

// Returns the ranks that do not wait themselves, among those that this rank waits for, those that
// these wait for, and so on. If there are none, all wait for each other, and the result is the
// rank's own peers.
std::vector<int> World::ranks_to_blame(int rank) const {
  std::vector<bool> seen(ranks_.size());
  std::vector<int> reached = {rank}, blamed;
  seen[rank] = true;
  for (size_t i = 0; i < reached.size(); ++i) {
    for (const int peer : peers_missing(reached[i])) {
      if (seen[peer]) continue;
      seen[peer] = true;
      reached.push_back(peer);
      if (peers_missing(peer).empty()) blamed.push_back(peer);
    }
  }
  std::sort(blamed.begin(), blamed.end());
  return blamed.empty() ? peers_missing(rank) : blamed;
}

// --- failing --------------------------------------------------------------------------------------------------------

std::string World::doing(int rank) const {
  const Rank& r = ranks_[rank];
  std::string text = name_of_rank(options_, rank);
  if (r.ended) return text + " has ended its work";
  text += r.record ? " is in " + to_string(*r.record) : " is in no collective";
  return text + "; its last collectives:\n" + (r.recorder ? r.recorder->text() : "  none\n");
}

void World::fail_waiting(int rank, const std::string& why) {
  const std::vector<int> blamed = ranks_to_blame(rank);
  std::string text = fmt::format("{}: {} {}; did not join: {}\n", to_string(*ranks_[rank].record),
                                 name_of_rank(options_, rank), why, names_of_ranks(options_, blamed));
  for (const int r : blamed) text += doing(r) + "\n";
  text += doing(rank);
  const Error error(ErrorKind::distributed, text);
  failure_ = Failure{.error = std::make_exception_ptr(error), .text = text};
  wake_all();
  throw error;
}

void World::check(int rank, const CollectiveRecord& record) {
  const std::lock_guard lock(mutex_);
  if (failure_) fail_because_of_other(rank, record);
}

void World::fail_because_of_other(int rank, const CollectiveRecord& record) const {
  MOEBIUS_FAIL(distributed, "{}: {} is ended, because the run has failed: {}", to_string(record),
               name_of_rank(options_, rank), failure_->text);
}

void World::fail(int rank, std::exception_ptr error, RankFailure failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) {
    const std::string name = name_of_rank(options_, rank);
    if (failure.kind) error = std::make_exception_ptr(Error(*failure.kind, name + ": " + failure.what));
    failure_ =
        Failure{.error = std::move(error), .text = fmt::format("{} threw: {}\n{}", name, failure.what, doing(rank))};
  }
  ranks_[rank].failure = std::move(failure);
  ranks_[rank].recorder = nullptr;
  wake_all();
}

void World::begin_rank(int rank, CollectiveFlightRecorder& recorder) {
  const std::lock_guard lock(mutex_);
  ranks_[rank].recorder = &recorder;
}

void World::end_rank(int rank) {
  const std::lock_guard lock(mutex_);
  ranks_[rank].ended = true;
  ranks_[rank].recorder = nullptr;
  wake_all();
}

void World::wake_all() {
  for (Rank& r : ranks_) r.news.notify_one();
}

void World::rethrow_failure() const {
  if (!failure_) return;
  const std::optional<RankFailure>& first = ranks_[0].failure;
  const bool all_alike = std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) {
    return r.failure && r.failure->kind && !r.failure->distributed && r.failure->kind == first->kind &&
           r.failure->what == first->what;
  });
  if (all_alike) throw Error(*first->kind, first->what);
  std::rethrow_exception(failure_->error);
}

// --- ranks ----------------------------------------------------------------------------------------------------------

class ThreadMessage final : public Message {
 public:
  ThreadMessage(World& world, const End& end) : world_(world), end_(end) { world_.post(end_); }
  ~ThreadMessage() override { world_.withdraw(end_); }
  End& end() { return end_; }

 private:
  World& world_;
  End end_;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(World& world, int rank) : world_(world), rank_(rank) { world_.begin_rank(rank, recorder()); }

  int rank() const override { return rank_; }
  int size() const override { return world_.size(); }

  std::unique_ptr<Message> send(int to_rank, int channel, const void* data, int64_t num_bytes) override {
    return post({.owner = rank_,
                 .peer = to_rank,
                 .channel = channel,
                 .sends = true,
                 .data = static_cast<std::byte*>(const_cast<void*>(data)),  // a send only reads it
                 .num_bytes = num_bytes});
  }
  std::unique_ptr<Message> recv(int from_rank, int channel, void* data, int64_t num_bytes) override {
    return post({.owner = rank_,
                 .peer = from_rank,
                 .channel = channel,
                 .data = static_cast<std::byte*>(data),
                 .num_bytes = num_bytes});
  }
  void wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) override {
    std::vector<End*> ends;
    for (const auto& message : messages) ends.push_back(&static_cast<ThreadMessage&>(*message).end());
    world_.wait(rank_, ends, recorder().at(record), timeout_s());
  }
  void check() override { world_.check(rank_, recorder().last()); }
  const WorldOptions& options() const override { return world_.options(); }

 private:
  std::unique_ptr<Message> post(const End& end) { return std::make_unique<ThreadMessage>(world_, end); }

  World& world_;
  int rank_;
};

void run_rank(World& world, int rank, const RankBody& body) {
  ThreadTransport transport(world, rank);
  try {
    body(transport);
    world.end_rank(rank);
  } catch (...) {
    world.fail(rank, std::current_exception(), caught_failure());
  }
}

}  // namespace

void run_threads(int num_ranks, const WorldOptions& options, const RankBody& body) {
  MOEBIUS_CHECK(usage, num_ranks >= 1 && num_ranks <= 1024, "threads: a world has from 1 to 1024 ranks; got {}",
                num_ranks);
  World world(num_ranks, options);
  std::vector<std::jthread> threads;
  try {
    for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back([&, rank] { run_rank(world, rank, body); });
  } catch (const std::system_error& e) {
    const int rank = static_cast<int>(threads.size());
    const Error error(ErrorKind::usage,
                      fmt::format("threads: {} ranks were requested, but only {} could be started: {}; use fewer, or "
                                  "raise the limit on processes (ulimit -u)",
                                  num_ranks, rank, e.what()));
    world.fail(rank, std::make_exception_ptr(error), {.what = error.what()});
  }
  threads.clear();  // joins
  world.rethrow_failure();
}

}  // namespace moebius
