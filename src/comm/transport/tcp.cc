#include "comm/transport/tcp.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "comm/liveness/rank_failure.h"
#include "comm/transport/link_maker.h"
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
  explicit TcpTransport(const TcpOptions& options) : TcpTransport(options, rendezvous(options)) {}

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
  std::vector<LinkMeasurement> links() override { return links_.measurements(); }
  const WorldOptions& options() const override { return options_.world; }

  // Returns rank 0's reply if every rank has ended body by an exception of its own within the grace time, else nothing.
  // Rank 0 decides whether they have. text: the text of this rank's exception.
  std::optional<TcpLinks::ErrorReply> all_fail(const std::string& text);
  void send_failure(const RankFailure& failure);
  // Called when all ranks have ended: no rank may see a connection close from which it still reads.
  void leave();
  std::string name(int rank) const { return name_of_rank(options_.world, rank); }

 private:
  TcpTransport(const TcpOptions& options, Rendezvous found)
      : options_(options),
        links_(options.rank, std::move(found.sockets), [this](int r) { maker_.call(r); }),
        connections_at_start_(links_.num_connections()),
        maker_({.rank = options.rank,
                .size = options.size,
                .job = std::move(found.job),
                .listener = std::move(found.listener),
                .places = std::move(found.places),
                .warn = options.warn,
                .made = [this](int r, Socket s) { links_.add(r, std::move(s)); }}) {
    links_.watch(options_.stall_s, [this](int failed_rank) { end_stalled(failed_rank); });
  }
  std::unique_ptr<Message> post(const TcpEnd& end) { return std::make_unique<TcpMessage>(links_, end); }
  bool all_others(const std::function<bool(const TcpLinks::Peer&)>& are) const;
  void send_error_replies(uint64_t own_hash);
  void check_peers(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open);
  [[noreturn]] void fail_waiting(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open);
  std::string silence_of(std::span<const int> ranks);
  std::string unconnected(std::span<const int> ranks) const;
  std::string tail() { return fmt::format("last collectives of {}:\n{}", name(rank()), recorder().text()); }
  void end_stalled(int failed_rank);

  const TcpOptions options_;
  TcpLinks links_;
  const int connections_at_start_;
  LinkMaker maker_;  // begins after connections are counted, and ends before links_, to which it adds
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

// Processes the messages that have arrived from other ranks.
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
  const std::optional<int> failed = links_.first_failed();
  if (!failed) return;
  const TcpLinks::Peer& peer = links_.peer(*failed);
  MOEBIUS_CHECK(distributed, peer.failure.empty(), "{}: {} is ended, because {} has ended the run: {}", to_string(what),
                name(rank()), name(*failed), peer.failure);
  MOEBIUS_FAIL(distributed, "{}: {} waits, and the connection to {} broke: its process has ended; did not join: {}\n{}",
               to_string(what), name(rank()), name(*failed), name(*failed), tail());
}

void TcpTransport::fail_waiting(const CollectiveRecord& what, const std::vector<const TcpEnd*>& open) {
  std::vector<int> missing;
  for (const TcpEnd* end : open) missing.push_back(end->peer);
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  MOEBIUS_FAIL(distributed, "{}: {} has waited for {} s; did not join: {}{}{}\n{}", to_string(what), name(rank()),
               timeout_s(), names_of_ranks(options_.world, missing), unconnected(missing), silence_of(missing), tail());
}

// Returns a text that names the connections which were never made.
std::string TcpTransport::unconnected(std::span<const int> ranks) const {
  std::string text;
  for (const int r : ranks) {
    if (links_.is_connected(r)) continue;
    text += r > rank() ? fmt::format("; {} has never connected to {}", name(r), name(rank()))
                       : fmt::format(
                             "; {} could not connect to {} at {}; check that no firewall is between them, or "
                             "set MOEBIUS_HOST of that rank to an address that this machine reaches",
                             name(rank()), name(r), maker_.why_not(r));
  }
  return text;
}

// A machine acknowledges data even if the process of its rank is stopped. So a machine that does not is down, or the
// link to it is cut. Returns a text that names each such link; empty where all machines answer.
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

std::optional<TcpLinks::ErrorReply> TcpTransport::all_fail(const std::string& text) {
  if (rank() == 0) {
    const auto has_failed = [](const TcpLinks::Peer& p) { return p.own_error.has_value(); };
    if (!links_.move_until(options_.grace_s, [&] { return all_others(has_failed); })) return {};
    send_error_replies(hash_of(text));
    return TcpLinks::ErrorReply{};
  }
  links_.send_own_error(hash_of(text));
  std::optional<TcpLinks::ErrorReply> reply;
  links_.move_until(options_.grace_s, [&] {
    reply = links_.error_reply();
    return reply.has_value();
  });
  return reply;
}

// REQUIRES: this is rank 0, and all others have sent an error of their own.
void TcpTransport::send_error_replies(uint64_t own_hash) {
  std::vector<uint64_t> hashes{own_hash};
  links_.move_until(0, [&] {
    for (int r = 1; r < size(); ++r) hashes.push_back(*links_.peer(r).own_error);
    return true;
  });
  std::set<uint64_t> seen{own_hash};
  for (int r = 1; r < size(); ++r) links_.send_error_reply(r, {.is_repeated = !seen.insert(hashes[r]).second});
}

// A rank whose wait cannot end reports before it is ended:
// together the reports show which rank waits for which.
void TcpTransport::send_failure(const RankFailure& failure) {
  const auto is_through = [](const TcpLinks::Peer& p) {
    return p.state != TcpLinks::Peer::State::here || !p.failure.empty();
  };
  if (failure.distributed) links_.move_until(options_.grace_s, [&] { return all_others(is_through); });
  links_.send_failure(failure.what.substr(0, failure.what.find('\n')));
  links_.move_until(options_.grace_s, [&] { return links_.nothing_to_send(); });
}

// Rank 0 informs every rank about all others, and ends last. So ranks without a connection need none for this.
void TcpTransport::leave() {
  if (options_.connections)
    options_.connections({.at_start = connections_at_start_, .at_end = links_.num_connections()});
  links_.send_left();
  if (rank() == 0) {
    const auto is_gone = [](const TcpLinks::Peer& p) { return p.state != TcpLinks::Peer::State::here; };
    links_.move_until(options_.grace_s, [&] { return all_others(is_gone); });
    links_.send_all_left();
    links_.move_until(options_.grace_s, [&] { return links_.nothing_to_send(); });
  } else {
    links_.move_until(options_.grace_s,
                      [&] { return links_.have_all_left() || links_.peer(0).state == TcpLinks::Peer::State::lost; });
  }
}

void TcpTransport::end_stalled(int failed_rank) {
  if (options_.report)
    options_.report(fmt::format("{} is ended: {} has ended the run, and {} has joined no collective for {} s since\n{}",
                                name(rank()), name(failed_rank), name(rank()), options_.stall_s, tail()));
  if (options_.end_process) options_.end_process();
}

// Returns when every rank has failed by itself, as with a wrong recipe.
// Then each ends as a single process would.
TcpLinks::ErrorReply end_unless_all_fail(const TcpOptions& options, TcpTransport& transport,
                                         const RankFailure& failure) {
  if (!failure.distributed)
    if (const std::optional<TcpLinks::ErrorReply> reply = transport.all_fail(failure.what)) return *reply;
  if (options.report) options.report(report_of(failure, transport.name(transport.rank()), transport.recorder()));
  transport.send_failure(failure);
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
    const TcpLinks::ErrorReply reply = end_unless_all_fail(options, transport, failure);
    transport.leave();
    if (reply.is_repeated && failure.kind) throw Error(*failure.kind, "");
    throw;
  }
  transport.leave();
}

}  // namespace moebius
