#include "comm/transport/mpi.h"

#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>

#include "comm/liveness/call_watchdog.h"
#include "comm/liveness/rank_failure.h"
#include "comm/liveness/rank_watch.h"
#include "comm/liveness/stall_aware_deadline.h"
#include "core/fault.h"

namespace moebius {
namespace {

constexpr int64_t kMaxBytes = 1 << 30;  // bytes of one MPI message, since counts are int
constexpr double kGraceS = 2;           // time in which ranks with the same failure find each other
constexpr double kWatchS = 5;           // time to connect the RankWatch; the run then continues without it
constexpr double kForwardS = 0.05;      // time in which ranks forward that one of them ends all processes

std::string mpi_error(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int size = 0;
  MPI_Error_string(code, text, &size);
  return {text, static_cast<size_t>(size)};
}

void check_mpi(const char* call, int code) {
  MOEBIUS_CHECK(distributed, code == MPI_SUCCESS, "{}: {}", call, mpi_error(code));
}

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Calls `ended` until it returns true or the time is over.
// It polls without a pause while the answer may come within microseconds. Then it polls less and less often, so that
// other ranks on the same core can run.
template <class F>
bool poll_for(double seconds, F&& ended) {
  constexpr int kSpins = 200, kYields = 2000;
  StallAwareDeadline deadline(seconds);
  for (int64_t i = 0; !ended(); ++i) {
    if (i < kSpins) continue;
    if (deadline.is_over()) return ended();
    if (i < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

// Makes a call of MPI that all ranks must make together, and for which MPI has no timeout.
// throws: the text of the exception that this rank is about to throw.
void call_collectively(const MpiOptions& options, int rank, const char* call, const std::function<void()>& body,
                       const std::string& throws = "") {
  const CallWatchdog limit(options.world.timeout_before_steps_s(), [&] {
    const std::string name = name_of_rank(options.world, rank);
    if (options.report)
      options.report(fmt::format(
          "{}: {} has waited for {} s for the other ranks, one of which has not joined; check that all of them were "
          "started and are running{}",
          call, name, options.world.timeout_before_steps_s(),
          throws.empty() ? "" : fmt::format("\n{} threw: {}", name, throws)));
    if (options.end_process) options.end_process();
  });
  body();
}

void start_mpi(const MpiOptions& options) {
  int initialized = 0, provided = 0;
  MPI_Initialized(&initialized);
  MOEBIUS_CHECK(usage, !initialized, "mpi: a process runs one world of MPI; this is a second one");
  fault_point("mpi.init");
  call_collectively(options, options.rank, "MPI_Init_thread", [&] {
    check_mpi("MPI_Init_thread", MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
  });
  MOEBIUS_CHECK(usage, provided >= MPI_THREAD_FUNNELED, "mpi: this MPI allows no threads; got level {}", provided);
  // It is set on the world, too: MPI_Testall uses no particular communicator's handler.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

std::span<std::byte> span_of(std::byte* bytes, int64_t num_bytes) { return {bytes, static_cast<size_t>(num_bytes)}; }

class MpiMessage final : public Message {
 public:
  MpiMessage(MPI_Comm comm, bool sends, int peer, int channel, std::span<std::byte> bytes)
      : peer_(peer), num_bytes_(std::ssize(bytes)) {
    std::byte* data = bytes.data();
    for (int64_t at = 0; at < std::max<int64_t>(num_bytes_, 1); at += kMaxBytes) {
      const int size = static_cast<int>(std::min(kMaxBytes, num_bytes_ - at));
      MPI_Request& request = requests_.emplace_back(MPI_REQUEST_NULL);
      sends ? check_mpi("MPI_Isend", MPI_Isend(data + at, size, MPI_BYTE, peer, channel, comm, &request))
            : check_mpi("MPI_Irecv", MPI_Irecv(data + at, size, MPI_BYTE, peer, channel, comm, &request));
    }
    sends_ = sends;
  }
  ~MpiMessage() override {
    for (MPI_Request& request : requests_) {
      if (request == MPI_REQUEST_NULL) continue;
      if (!sends_) MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
  }

  int peer() const { return peer_; }
  bool ended(const CollectiveRecord& what) {
    if (requests_.empty()) return true;
    std::vector<MPI_Status> statuses(requests_.size());
    int all = 0;
    const int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all, statuses.data());
    if (code != MPI_SUCCESS) fail_size(what, mpi_error(code == MPI_ERR_IN_STATUS ? failed(statuses) : code));
    if (!all) return false;
    requests_.clear();
    if (!sends_) check_received(what, statuses);
    return true;
  }

 private:
  static int failed(const std::vector<MPI_Status>& statuses) {
    for (const MPI_Status& status : statuses)
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) return status.MPI_ERROR;
    return MPI_ERR_OTHER;
  }
  void check_received(const CollectiveRecord& what, const std::vector<MPI_Status>& statuses) const {
    int64_t received = 0;
    for (const MPI_Status& status : statuses) {
      int size = 0;
      MPI_Get_count(&status, MPI_BYTE, &size);
      received += size;
    }
    if (received != num_bytes_) fail_size(what, fmt::format("{} came", received));
  }
  [[noreturn]] void fail_size(const CollectiveRecord& what, const std::string& why) const {
    MOEBIUS_FAIL(distributed, "{}: {} bytes {} rank {}: {}; the ranks disagree about a shape or count", to_string(what),
                 num_bytes_, sends_ ? "to" : "from", peer_, why);
  }

  std::vector<MPI_Request> requests_;  // empty when the message has ended
  bool sends_ = false;
  int peer_;
  int64_t num_bytes_;
};

class MpiTransport final : public Transport {
 public:
  // The options must outlive it.
  explicit MpiTransport(const MpiOptions& options) : mpi_(options), options_(options.world) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    fault_point("mpi.dup");
    call_collectively(mpi_, rank_, "MPI_Comm_dup", [&] {
      check_mpi("MPI_Comm_dup", MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
      check_mpi("MPI_Comm_dup", MPI_Comm_dup(MPI_COMM_WORLD, &error_comm_));
    });
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const WorldOptions& options() const override { return options_; }
  std::unique_ptr<Message> send(int to_rank, int channel, const void* data, int64_t num_bytes) override {
    auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));  // a send only reads it
    return std::make_unique<MpiMessage>(comm_, /*sends=*/true, to_rank, channel, span_of(bytes, num_bytes));
  }
  std::unique_ptr<Message> recv(int from_rank, int channel, void* data, int64_t num_bytes) override {
    auto* bytes = static_cast<std::byte*>(data);
    return std::make_unique<MpiMessage>(comm_, /*sends=*/false, from_rank, channel, span_of(bytes, num_bytes));
  }

  void wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) override {
    const Waiting waiting(waiting_for_, record);
    const CollectiveRecord what = recorder().at(record);
    std::vector<MpiMessage*> open;
    for (const auto& message : messages) open.push_back(&static_cast<MpiMessage&>(*message));
    const auto all_ended = [&] {
      std::erase_if(open, [&](MpiMessage* message) { return message->ended(what); });
      if (!open.empty()) check();
      return open.empty();
    };
    if (!poll_for(timeout_s(), all_ended)) fail_waiting(what, open);
  }

  void check() override {
    const int dead = dead_rank_.load(std::memory_order_relaxed);
    if (dead >= 0) throw Error(ErrorKind::distributed, death_text(dead, waiting_for_, "waits"));
  }

  // Notes that the process of a rank has ended, so that this rank does not wait for any other from now on. Any thread
  // may call it. Returns the text to report at once, since this rank's thread may compute for longer than the
  // launcher allows.
  std::string note_death(int dead) {
    const std::string text = death_text(dead, waiting_for_, "computes");
    {
      const std::lock_guard lock(reported_mutex_);
      reported_ = first_line(text);
    }
    dead_rank_ = dead;
    return text;
  }
  // Notes that another rank has reported why the run ends. Any thread may call it.
  void note_ending() { is_ending_ = true; }
  // Returns whether the reason why this rank's wait failed was reported: by this rank, in these words, or by the rank
  // that ends the run. What the rank throws may also have the phase and the layer of its wait.
  bool was_reported(const std::string& what) const {
    const std::lock_guard lock(reported_mutex_);
    return is_ending_ || reported_ == first_line(what);
  }

  // Returns whether every rank calls this within the grace time.
  bool all_fail(double seconds) {
    MPI_Request request;
    MPI_Ibarrier(error_comm_, &request);
    return poll_for(seconds, [&] {
      int met = 0;
      MPI_Test(&request, &met, MPI_STATUS_IGNORE);
      return met != 0;
    });
  }
  // Returns whether a lower rank passes the same text. REQUIRES: all_fail() returned true.
  bool is_repeated_error(const std::string& text) {
    const uint64_t mine = std::hash<std::string>{}(text);
    std::vector<uint64_t> all(size_);
    fault_point("mpi.own_error");
    const auto gather = [&] { MPI_Allgather(&mine, 1, MPI_UINT64_T, all.data(), 1, MPI_UINT64_T, error_comm_); };
    call_collectively(mpi_, rank_, "MPI_Allgather", gather, text);
    return std::find(all.begin(), all.begin() + rank_, mine) != all.begin() + rank_;
  }
  // The destructor does not do this:
  // after an exception that other ranks do not have, it would wait for them.
  // throws: as in call_collectively.
  void release(const std::string& throws = "") {
    const auto free_both = [&] {
      MPI_Comm_free(&comm_);
      MPI_Comm_free(&error_comm_);
    };
    call_collectively(mpi_, rank_, "MPI_Comm_free", free_both, throws);
  }
  // The last call of MPI.
  void finish(const std::string& throws = "") {
    release(throws);
    fault_point("mpi.finalize");
    call_collectively(
        mpi_, rank_, "MPI_Finalize", [] { MPI_Finalize(); }, throws);
  }

 private:
  // While it exists, other threads can see what the rank's thread waits for.
  class Waiting {
   public:
    Waiting(std::atomic<int64_t>& where, int64_t record) : where_(where) { where_ = record; }
    ~Waiting() { where_ = -1; }
    Waiting(const Waiting&) = delete;

   private:
    std::atomic<int64_t>& where_;
  };

  std::string name(int rank) const { return name_of_rank(options_, rank); }
  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }
  // record: the collective that this rank waits for; negative: none, and the text says by `otherwise` what the rank
  // does instead.
  std::string death_text(int dead, int64_t record, const char* otherwise) {
    const std::string doing = record < 0 ? fmt::format("{} {}", name(rank_), otherwise)
                                         : fmt::format("{}: {} waits", to_string(recorder().at(record)), name(rank_));
    return fmt::format("{}, and the process of {} has ended; did not join: {}\nlast collectives of {}:\n{}", doing,
                       name(dead), name(dead), name(rank_), recorder().text());
  }
  [[noreturn]] void fail_waiting(const CollectiveRecord& what, const std::vector<MpiMessage*>& open) {
    std::vector<int> missing;
    for (const MpiMessage* message : open) missing.push_back(message->peer());
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    MOEBIUS_FAIL(distributed, "{}: {} has waited for {} s; did not join: {}\nlast collectives of {}:\n{}",
                 to_string(what), name_of_rank(options_, rank_), timeout_s(), names_of_ranks(options_, missing),
                 name_of_rank(options_, rank_), recorder().text());
  }

  const MpiOptions& mpi_;
  const WorldOptions& options_;
  MPI_Comm comm_ = MPI_COMM_NULL, error_comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::atomic<int64_t> waiting_for_ = -1;  // a record of recorder()
  std::atomic<int> dead_rank_ = -1;
  std::atomic<bool> is_ending_ = false;
  mutable std::mutex reported_mutex_;
  std::string reported_;  // the first line of what note_death() returned
};

// Uses messages of its own, so that the flight recorder shows only the run's collectives.
std::unique_ptr<RankWatch> watch_ranks(const MpiOptions& options, MpiTransport& transport) {
  MpiTransport rendezvous(options);
  Control control(rendezvous);
  const auto on_death = [&options, &transport](int rank) {
    const std::string text = transport.note_death(rank);
    if (options.report) options.report(text);
  };
  auto watch = std::make_unique<RankWatch>(
      control, kWatchS, RankWatch::Listener{.death = on_death, .ending = [&transport] { transport.note_ending(); }});
  if (!watch->why_missing().empty() && control.is_root() && options.warn)
    options.warn(
        fmt::format("mpi: the ranks could not connect to each other outside MPI ({}); the run continues, but only the "
                    "launcher will notice a rank that is killed",
                    watch->why_missing()));
  rendezvous.release();
  return watch;
}

// Ends all processes. Open MPI 4 would first send mpirun a text about the call. While mpirun handled that text, it has
// crashed (4.1.4, in pmix_server_log_fn), and ended with code 139. The ranks have reported, so the text is turned off.
void end_all() {
  if (void* quiet = ::dlsym(RTLD_DEFAULT, "orte_execute_quiet")) *static_cast<bool*>(quiet) = true;
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(ErrorKind::distributed));
}

// Returns when every rank has failed by itself, as with a wrong recipe.
// Then each ends as a single process would.
// Otherwise the run ends here.
// Ranks whose waits cannot end report before one of them ends all processes: together the reports show which rank waits
// for which. watch: null where this rank failed before it had one.
void end_unless_all_fail(const MpiOptions& options, MpiTransport& transport, RankWatch* watch,
                         const RankFailure& failure) {
  if (!failure.distributed && transport.all_fail(kGraceS)) return;
  if (options.report && !(failure.distributed && transport.was_reported(failure.what)))
    options.report(report_of(failure, name_of_rank(options.world, transport.rank()), transport.recorder()));
  if (failure.distributed) sleep_s(kGraceS);
  if (watch) watch->announce_abort();
  sleep_s(kForwardS);
  end_all();
}

}  // namespace

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int size = 0;
  MPI_Get_library_version(text, &size);
  const std::string version(text);  // Open MPI counts the end of the string among its characters
  return version.substr(0, version.find('\n'));
}

void run_mpi(const MpiOptions& options, const RankBody& body) {
  start_mpi(options);
  MpiTransport transport(options);
  std::unique_ptr<RankWatch> watch;
  try {
    watch = watch_ranks(options, transport);
    body(transport);
    std::vector<int> all(transport.size());
    std::iota(all.begin(), all.end(), 0);
    transport.make_group("end of the run", all)->barrier();
  } catch (...) {
    const RankFailure failure = caught_failure();
    end_unless_all_fail(options, transport, watch.get(), failure);
    if (watch) watch->announce_exit();
    const bool is_repeated = transport.is_repeated_error(failure.what);
    transport.finish(failure.what);
    if (is_repeated && failure.kind) {
      // mpirun ends all processes when one of them ends so. The rank that reports the error
      // must end first.
      sleep_s(1);
      throw Error(*failure.kind, "");
    }
    throw;
  }
  watch->announce_exit();
  transport.finish();
}

}  // namespace moebius
