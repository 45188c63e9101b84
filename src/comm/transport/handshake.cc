#include "comm/transport/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace moebius {
namespace {

constexpr uint64_t kMagic = 0x3273756962656f6d;  // "moebius2"
constexpr std::byte kAccepted{1};
constexpr size_t kMaxNamed = 8;  // refused connections that messages name
constexpr const char *kGreeting = "a greeting", *kChallenge = "a challenge", *kAnswer = "an answer",
                     *kAcceptance = "the acceptance";

struct Greeting {
  uint64_t magic = kMagic;
  uint64_t run = 0;  // a hash of its name
  int32_t rank = 0, size = 0, port = 0, unused = 0;
  Nonce nonce{};
  char host[256] = {};
};
struct Challenge {
  uint64_t magic = kMagic;
  int32_t rank = 0, unused = 0;
  Nonce nonce{};
  Proof proof{};
};
using Answer = Proof;

uint64_t hash_of(const std::string& run) { return std::hash<std::string>{}(run); }

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Returns the proof of one end. The two ends prove different texts, so that an end cannot send back the proof
// that it received.
Proof proof_of(const Job& job, const char* end, const Greeting& greeting, const Challenge& challenge) {
  std::vector<std::byte> text;
  const auto add = [&](std::span<const std::byte> bytes) { text.insert(text.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(end, std::strlen(end) + 1)));
  add(bytes_of(greeting));
  add(bytes_of(challenge.rank));
  add(bytes_of(challenge.nonce));
  add(std::as_bytes(std::span(job.run)));
  return prove(job.secret, text);
}
Proof proof_of_acceptor(const Job& job, const Greeting& g, const Challenge& c) {
  return proof_of(job, "acceptor", g, c);
}
Proof proof_of_connector(const Job& job, const Greeting& g, const Challenge& c) {
  return proof_of(job, "connector", g, c);
}

Greeting greeting_of(const Job& job, const RankGreeting& mine) {
  Greeting g{.run = hash_of(job.run), .rank = mine.rank, .size = mine.size, .port = mine.port, .nonce = draw_nonce()};
  MOEBIUS_CHECK(usage, mine.host.size() < sizeof g.host, "tcp: the name of a host has at most {} characters; got {}",
                sizeof g.host - 1, mine.host.size());
  std::copy(mine.host.begin(), mine.host.end(), g.host);
  return g;
}

RankGreeting rank_greeting_of(const Greeting& g) {
  return {
      .rank = g.rank, .size = g.size, .port = g.port, .host = std::string(g.host, ::strnlen(g.host, sizeof g.host))};
}

}  // namespace

// --- the end that connects ------------------------------------------------------------------------------------------

struct HandshakeConnector::State {
  Job job;
  int to_rank = 0;
  Greeting greeting;
  std::vector<std::byte> received;  // of the message that is arriving
  bool has_answered = false;
};

HandshakeConnector::HandshakeConnector(const Job& job, const RankGreeting& mine, int to_rank)
    : state_(new State{.job = job, .to_rank = to_rank, .greeting = greeting_of(job, mine)}) {}
HandshakeConnector::~HandshakeConnector() = default;
HandshakeConnector::HandshakeConnector(HandshakeConnector&&) noexcept = default;
HandshakeConnector& HandshakeConnector::operator=(HandshakeConnector&&) noexcept = default;

// Messages are a few hundred bytes on a new connection, which takes them at once.
void HandshakeConnector::greet(const Socket& connection) {
  write_value(connection, state_->greeting, Deadline(), kGreeting);
}

bool HandshakeConnector::is_accepted(const Socket& connection) {
  State& s = *state_;
  if (s.has_answered) return read_available(connection, s.received, 1, kAcceptance);
  if (!read_available(connection, s.received, sizeof(Challenge), kChallenge)) return false;
  Challenge challenge;
  std::memcpy(&challenge, s.received.data(), sizeof challenge);
  s.received.clear();
  MOEBIUS_CHECK(distributed, challenge.magic == kMagic, "another program answers");
  MOEBIUS_CHECK(distributed, is_same(challenge.proof, proof_of_acceptor(s.job, s.greeting, challenge)),
                "the rank there does not know the secret of this job");
  MOEBIUS_CHECK(distributed, challenge.rank == s.to_rank, "rank {} is there", challenge.rank);
  write_value<Answer>(connection, proof_of_connector(s.job, s.greeting, challenge), Deadline(), kAnswer);
  s.has_answered = true;
  return false;
}

bool HandshakeConnector::has_answered() const { return state_->has_answered; }

void complete_handshake(const Socket& connection, const Job& job, const RankGreeting& mine, int to_rank,
                        Deadline deadline) {
  HandshakeConnector handshake(job, mine, to_rank);
  handshake.greet(connection);
  while (!handshake.is_accepted(connection))
    MOEBIUS_CHECK(distributed, wait_readable(connection, deadline), "tcp: receiving {} or {}: nothing came in time",
                  kChallenge, kAcceptance);
}

// --- the end that is connected to -----------------------------------------------------------------------------------

struct HandshakeAcceptor::PendingConnection {
  Socket socket;
  std::string from;
  Deadline deadline;
  std::vector<std::byte> received;  // of the message that is arriving
  bool has_greeted = false;
  Greeting greeting;
  Challenge challenge;
};

HandshakeAcceptor::HandshakeAcceptor(Socket listener, Job job, int rank, std::function<void(const std::string&)> warn,
                                     int expected)
    : listener_(std::move(listener)),
      job_(std::move(job)),
      rank_(rank),
      warn_(std::move(warn)),
      max_pending_(kMaxPending + static_cast<size_t>(expected)) {}

HandshakeAcceptor::~HandshakeAcceptor() = default;

std::optional<HandshakeAcceptor::Member> HandshakeAcceptor::next(Deadline deadline) {
  for (bool first = true; first || milliseconds_until(deadline) > 0; first = false) {
    std::vector<pollfd> polled;
    const Deadline wake = std::min(deadline, add_polled(polled));
    if (::poll(polled.data(), polled.size(), milliseconds_until(wake)) < 0) continue;  // a signal
    if (std::optional<Member> member = handle_polled(polled)) return member;
  }
  return std::nullopt;
}

Deadline HandshakeAcceptor::add_polled(std::vector<pollfd>& polled) const {
  Deadline wake = Deadline::max();
  polled.push_back({.fd = listener_.descriptor(), .events = POLLIN, .revents = 0});
  for (const PendingConnection& v : pending_) {
    polled.push_back({.fd = v.socket.descriptor(), .events = POLLIN, .revents = 0});
    wake = std::min(wake, v.deadline);
  }
  return wake;
}

std::optional<HandshakeAcceptor::Member> HandshakeAcceptor::handle_polled(std::span<const pollfd> polled) {
  std::vector<bool> has_news;
  for (const pollfd& connection : polled.subspan(1)) has_news.push_back(connection.revents != 0);
  if (std::optional<Member> member = handle_pending(has_news)) return member;
  if (polled[0].revents != 0) accept_one();
  return std::nullopt;
}

std::optional<HandshakeAcceptor::Member> HandshakeAcceptor::handle_pending(const std::vector<bool>& has_news) {
  for (size_t i = has_news.size(); i-- > 0;) {
    PendingConnection& v = pending_[i];
    try {
      if (has_news[i] && has_proved(v)) {
        Member member{.socket = std::move(v.socket), .greeting = rank_greeting_of(v.greeting)};
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
        return member;
      }
      if (milliseconds_until(v.deadline) > 0) continue;
      MOEBIUS_FAIL(distributed, "has proved nothing for {} s", kHandshakeTimeoutS);
    } catch (const Error& e) {
      refuse(v, e.what());
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return std::nullopt;
}

void HandshakeAcceptor::accept_one() {
  Socket s = accept_until(listener_, Deadline());
  if (!s.is_open()) return;
  std::string from = peer_host(s);
  pending_.push_back({.socket = std::move(s), .from = std::move(from), .deadline = deadline_in(kHandshakeTimeoutS)});
  if (pending_.size() <= max_pending_) return;
  refuse(pending_.front(), "is one of too many that have proved nothing");
  pending_.erase(pending_.begin());
}

bool HandshakeAcceptor::has_proved(PendingConnection& v) const {
  const size_t size = v.has_greeted ? sizeof(Answer) : sizeof(Greeting), have = v.received.size();
  v.received.resize(size);
  const ssize_t n = ::recv(v.socket.descriptor(), v.received.data() + have, size - have, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return v.received.resize(have), false;
  MOEBIUS_CHECK(distributed, n > 0, "closed the connection before it had proved the job's secret{}",
                v.has_greeted ? fmt::format("; it calls itself rank {}", v.greeting.rank) : "");
  v.received.resize(have + n);
  if (!v.has_greeted && v.received.size() >= sizeof kMagic)
    MOEBIUS_CHECK(distributed, std::memcmp(v.received.data(), &kMagic, sizeof kMagic) == 0, "is another program");
  if (v.received.size() < size) return false;
  if (!v.has_greeted) return challenge(v), false;
  Answer answer;
  std::memcpy(&answer, v.received.data(), sizeof answer);
  MOEBIUS_CHECK(distributed, is_same(answer, proof_of_connector(job_, v.greeting, v.challenge)),
                "did not prove that it knows the job's secret; it calls itself rank {}", v.greeting.rank);
  write_value(v.socket, kAccepted, Deadline(), kAcceptance);
  return true;
}

void HandshakeAcceptor::challenge(PendingConnection& v) const {
  std::memcpy(&v.greeting, v.received.data(), sizeof v.greeting);
  v.received.clear();
  v.has_greeted = true;
  MOEBIUS_CHECK(distributed, v.greeting.run == hash_of(job_.run), "is a rank of another run");
  MOEBIUS_CHECK(distributed, v.greeting.rank >= 0 && v.greeting.rank != rank_, "calls itself rank {}", v.greeting.rank);
  v.challenge = {.rank = rank_, .nonce = draw_nonce()};
  v.challenge.proof = proof_of_acceptor(job_, v.greeting, v.challenge);
  write_value(v.socket, v.challenge, Deadline(), kChallenge);
}

void HandshakeAcceptor::refuse(const PendingConnection& v, const std::string& why) {
  const std::string text = fmt::format("{}, which {}", v.from.empty() ? "an unknown address" : v.from, why);
  ++num_refused_;
  if (refused_.size() >= kMaxNamed || std::find(refused_.begin(), refused_.end(), text) != refused_.end()) return;
  refused_.push_back(text);
  if (warn_) warn_(fmt::format("tcp: rank {} has refused a connection from {}", rank_, text));
}

std::string HandshakeAcceptor::refused_text() const {
  std::string text;
  for (const std::string& each : refused_) text += (text.empty() ? "; refused: " : ", ") + each;
  const auto more = num_refused_ - std::ssize(refused_);
  return more > 0 ? text + fmt::format(" and {} more", more) : text;
}

}  // namespace moebius
