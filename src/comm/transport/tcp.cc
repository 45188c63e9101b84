#include "comm/transport/tcp.h"

#include <algorithm>
#include <numeric>

#include "comm/liveness/rank_failure.h"
#include "comm/transport/tcp_bootstrap.h"
#include "comm/transport/tcp_links.h"

namespace moebius {
namespace {

constexpr double kProbeS = 1;  // time in which a machine acknowledges a few bytes

uint64_t hash_of(const std::string& text) { return std::hash<std::string>{}(text); }

class TcpMessage final : public Message {
 public:
  TcpMessage(TcpLinks& links, const TcpEnd& end) : links_(links), end_(end) { links_.post(end_); }
  ~TcpMessage() override { links_.withdraw(end_); }
  const TcpEnd& end() const { return end_; }

 private:
  TcpLinks& links_;
  TcpEnd end_;
};

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(const TcpOptions& options) : options_(options), links_(options.rank, connect_all(options)) {
    links_.watch(options_.stall_s, [this](int failed_rank) { end_stalled(failed_rank); });
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  std::unique_ptr<Message> send(int to_rank, int channel, const void* data, int64_t num_bytes) override {
    return post({.peer = to_rank,
                 .channel = channel,
                 .sends = true,
                 .data = static_cast<std::byte*>(const_cast<void*>(data)),  // a send only reads it
                 .num_bytes = num_bytes});
  }
  std::unique_ptr<Message> recv(int from_rank, int channel, void* data, int64_t num_bytes) override {
    return post({.peer = from_rank, .channel = channel, .data = static_cast<std::byte*>(data), .num_bytes = num_bytes});
  }
  void wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) override;
  void check() override;
  const WorldOptions& options() const override { return options_.world; }

  // Returns whether every rank has ended body by an exception of its own within the grace time.
  bool all_meet(const std::string& text);
  // Returns whether a lower rank passes the same text. REQUIRES: all_meet() returned true.
  bool was_said_before(const std::string& text);
  void tell_failure(const RankFailure& failure);
  // Called when all ranks have ended: no rank may see a connection close from which it still reads.
  void leave();
  std::string name(int rank) const { return name_of_rank(options_.world, rank); }

 private:
  std::unique_ptr<Message> post(const TcpEnd& end) { return std::make_unique<TcpMessage>(links_, end); }
  bool all_others(const std::function<bool(const TcpLinks::Peer&)>& are) const;
  void check_peers(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open);
  [[noreturn]] void fail_waiting(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open);
  std::string silence_of(std::span<const int> ranks);
  std::string tail() { return fmt::format("last collectives of {}:\n{}", name(rank()), recorder().text()); }
  void end_stalled(int failed_rank);

  const TcpOptions options_;
  TcpLinks links_;
};

// --- waiting --------------------------------------------------------------------------------------------------------

void TcpTransport::wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) {
  const CollectiveRecord what = recorder().at(record);
  std::vector<const TcpEnd*> open;
  for (const auto& message : messages) open.push_back(&static_cast<const TcpMessage&>(*message).end());
  const auto all_ended = [&] {
    std::erase_if(open, [](const TcpEnd* end) { return end->state == TcpEnd::State::ended; });
    if (!open.empty()) check_peers(what, open);
    return open.empty();
  };
  if (!links_.move_until(timeout_s(), all_ended)) fail_waiting(what, open);
}

// Processes what has arrived from the other ranks meanwhile.
void TcpTransport::check() {
  links_.move_until(0, [&] {
    check_peers(recorder().last(), {});
    return true;
  });
}

void TcpTransport::check_peers(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open) {
  for (const TcpEnd* end : open) {
    MOEBIUS_CHECK(distributed, end->state != TcpEnd::State::mismatched,
                  "{}: {} expects {} bytes from {}, which sends {}; the ranks disagree about a shape or count",
                  to_string(what), name(rank()), end->num_bytes, name(end->peer), end->peer_bytes);
    MOEBIUS_CHECK(distributed, links_.peer(end->peer).state != TcpLinks::Peer::State::left,
                  "{}: {} waits for a rank that has ended its work; did not join: {}\n{}", to_string(what),
                  name(rank()), name(end->peer), tail());
  }
  for (int r = 0; r < size(); ++r) {
    const TcpLinks::Peer& peer = links_.peer(r);
    MOEBIUS_CHECK(distributed, peer.failure.empty(), "{}: {} is ended, because {} has ended the run: {}",
                  to_string(what), name(rank()), name(r), peer.failure);
    MOEBIUS_CHECK(distributed, peer.state != TcpLinks::Peer::State::lost,
                  "{}: {} waits, and the connection to {} broke: its process has ended; did not join: {}\n{}",
                  to_string(what), name(rank()), name(r), name(r), tail());
  }
}

void TcpTransport::fail_waiting(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open) {
  std::vector<int> missing;
  for (const TcpEnd* end : open) missing.push_back(end->peer);
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  MOEBIUS_FAIL(distributed, "{}: {} has waited for {} s; did not join: {}{}\n{}", to_string(what), name(rank()),
               timeout_s(), names_of_ranks(options_.world, missing), silence_of(missing), tail());
}

// A machine acknowledges what it gets even where the process of its rank is stopped. So one that does not is down, or
// the link to it is cut. Returns a text that names each such link; empty where all machines answer.
std::string TcpTransport::silence_of(std::span<const int> ranks) {
  std::vector<double> silent_s(ranks.size());
  links_.probe(ranks);
  links_.move_until(kProbeS, [&] {
    for (size_t i = 0; i < ranks.size(); ++i) silent_s[i] = links_.silent_s(ranks[i]);
    return std::all_of(silent_s.begin(), silent_s.end(), [](double s) { return s == 0; });
  });
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (silent_s[i] < kProbeS / 2) continue;
    const auto [own, other] = links_.addresses(ranks[i]);
    text += fmt::format(
        "; {}, the machine of {}, has answered nothing for {:.1f} s: it is down, or the link from {} "
        "to it is cut",
        other, name(ranks[i]), silent_s[i], own);
  }
  return text;
}

// --- ends -----------------------------------------------------------------------------------------------------------

bool TcpTransport::all_others(const std::function<bool(const TcpLinks::Peer&)>& are) const {
  for (int r = 0; r < size(); ++r)
    if (r != rank() && !are(links_.peer(r))) return false;
  return true;
}

bool TcpTransport::all_meet(const std::string& text) {
  links_.say_farewell(hash_of(text));
  return links_.move_until(options_.grace_s, [&] {
    return links_.nothing_to_send() && all_others([](const TcpLinks::Peer& p) { return p.farewell.has_value(); });
  });
}

bool TcpTransport::was_said_before(const std::string& text) {
  bool was_said = false;
  links_.move_until(options_.grace_s, [&] {
    for (int r = 0; r < rank(); ++r) was_said |= links_.peer(r).farewell == hash_of(text);
    return true;
  });
  return was_said;
}

// A rank that waits in vain reports before it is ended:
// together the reports show which rank waits for which.
void TcpTransport::tell_failure(const RankFailure& failure) {
  const auto is_through = [](const TcpLinks::Peer& p) {
    return p.state != TcpLinks::Peer::State::here || !p.failure.empty();
  };
  if (failure.distributed) links_.move_until(options_.grace_s, [&] { return all_others(is_through); });
  links_.say_failure(failure.what.substr(0, failure.what.find('\n')));
  links_.move_until(options_.grace_s, [&] { return links_.nothing_to_send(); });
}

void TcpTransport::leave() {
  links_.say_left();
  links_.move_until(options_.grace_s, [&] {
    return links_.nothing_to_send() &&
           all_others([](const TcpLinks::Peer& p) { return p.state != TcpLinks::Peer::State::here; });
  });
}

void TcpTransport::end_stalled(int failed_rank) {
  if (options_.report)
    options_.report(fmt::format("{} is ended: {} has ended the run, and {} has joined no collective for {} s since\n{}",
                                name(rank()), name(failed_rank), name(rank()), options_.stall_s, tail()));
  if (options_.end_process) options_.end_process();
}

// Returns when every rank has failed by itself, as with a wrong recipe.
// Then each ends as a single process would.
void end_unless_all_fail(const TcpOptions& options, TcpTransport& transport, const RankFailure& failure) {
  if (!failure.distributed && transport.all_meet(failure.what)) return;
  if (options.report) options.report(report_of(failure, transport.name(transport.rank()), transport.recorder()));
  transport.tell_failure(failure);
  throw Error(ErrorKind::distributed, "");
}

}  // namespace

void run_tcp(const TcpOptions& options, const RankBody& body) {
  TcpTransport transport(options);
  try {
    body(transport);
    std::vector<int> all(transport.size());
    std::iota(all.begin(), all.end(), 0);
    transport.make_group("end of the run", all)->barrier();
  } catch (...) {
    const RankFailure failure = caught_failure();
    end_unless_all_fail(options, transport, failure);
    const bool was_said = transport.was_said_before(failure.what);
    transport.leave();
    if (was_said && failure.kind) throw Error(*failure.kind, "");
    throw;
  }
  transport.leave();
}

}  // namespace moebius
