#include "comm/transport/link_maker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/start_thread.h"

namespace moebius {
namespace {

// A machine that is down does not answer. Attempts are repeated this often, so that a link is used soon
// after its repair.
constexpr double kConnectS = 5;
constexpr double kFirstRetryS = 0.05, kLongestRetryS = 1;
constexpr double kLookS = 0.02;  // the result of a name look-up is polled this often
constexpr auto kAcceptRetry = std::chrono::milliseconds(100);

double retry_s(int attempt) { return std::min(kLongestRetryS, kFirstRetryS * (1 << std::min(attempt, 10))); }

}  // namespace

LinkMaker::LinkMaker(Options o)
    : rank_(o.rank),
      size_(o.size),
      job_(std::move(o.job)),
      places_(std::move(o.places)),
      warn_(std::move(o.warn)),
      made_(std::move(o.made)),
      look_up_(std::move(o.look_up)),
      look_up_s_(o.look_up_s),
      answer_s_(o.answer_s),
      waker_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      is_connected_(static_cast<size_t>(size_)),
      num_awaited_(size_ - 1 - rank_) {
  MOEBIUS_CHECK(distributed, waker_.is_open(), "tcp: eventfd: {}", std::strerror(errno));
  if (o.listener.is_open()) acceptor_.emplace(std::move(o.listener), job_, rank_, warn_, /*expected=*/num_awaited_);
  if (rank_ > 0)
    thread_ = start_thread([this] { return std::jthread([this](const std::stop_token& stop) { run(stop); }); });
}

void LinkMaker::call(int rank) {
  const std::lock_guard lock(mutex_);
  new_calls_.push_back(rank);
  why_not_[rank] = fmt::format("{}: nothing there has answered yet", to_string(places_[rank]));
  wake();
}

std::string LinkMaker::why_not(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = why_not_.find(rank);
  return found == why_not_.end() ? "" : found->second;
}

void LinkMaker::set_why_not(int rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  why_not_[rank] = fmt::format("{}: {}", to_string(places_[rank]), why);
}

void LinkMaker::wake() {
  const uint64_t one = 1;
  (void)!::write(waker_.descriptor(), &one, sizeof one);
}

void LinkMaker::run(const std::stop_token& stop) {
  const std::stop_callback wakes(stop, [this] { wake(); });
  while (!stop.stop_requested()) {
    take_new_calls();
    std::vector<pollfd> polled{{.fd = waker_.descriptor(), .events = POLLIN, .revents = 0}};
    Deadline due = Deadline::max();
    for (const Call& call : calls_) {
      const auto events = static_cast<short>(call.handshake ? POLLIN : POLLOUT);
      polled.push_back({.fd = call.socket.descriptor(), .events = events, .revents = 0});  // poll skips closed sockets
      due = std::min(due, call.due);
    }
    if (acceptor_) due = std::min(due, acceptor_->add_polled(polled));
    if (::poll(polled.data(), polled.size(), milliseconds_until(due)) < 0) continue;  // a signal
    uint64_t times = 0;
    if (polled[0].revents != 0) (void)!::read(waker_.descriptor(), &times, sizeof times);
    const size_t num_calls = calls_.size();
    advance_all(std::span(polled).subspan(1, num_calls));
    if (acceptor_) admit(std::span(polled).subspan(1 + num_calls));
  }
}

// --- ranks that connect to this one ---------------------------------------------------------------------------------

void LinkMaker::admit(std::span<const pollfd> polled) {
  try {
    if (std::optional<HandshakeAcceptor::Member> member = acceptor_->handle_polled(polled)) accept(std::move(*member));
  } catch (const Error& e) {  // too many open files, which may pass
    if (warn_) warn_(e.what());
    std::this_thread::sleep_for(kAcceptRetry);
  }
}

// Closes the connection of a process that proved the secret but is not a rank that may connect, such as another process
// with the number of a rank.
void LinkMaker::accept(HandshakeAcceptor::Member member) {
  const int from = member.greeting.rank;
  if (from <= rank_ || from >= size_ || is_connected_[from]) return;
  is_connected_[from] = true;
  made_(from, std::move(member.socket));
  if (--num_awaited_ == 0) acceptor_.reset();
}

// --- ranks that this one connects to --------------------------------------------------------------------------------

void LinkMaker::take_new_calls() {
  const std::lock_guard lock(mutex_);
  for (const int rank : std::exchange(new_calls_, {})) calls_.push_back({.rank = rank});
}

void LinkMaker::advance_all(std::span<const pollfd> polled) {
  std::vector<Call> open;
  for (size_t i = 0; i < polled.size(); ++i)
    if (!advance(calls_[i], polled[i].revents != 0)) open.push_back(std::move(calls_[i]));
  calls_ = std::move(open);
}

bool LinkMaker::advance(Call& call, bool has_news) {
  const bool is_due = milliseconds_until(call.due) == 0;
  try {
    if (!call.socket.is_open()) {
      if (is_due) begin_attempt(call);
    } else if (!call.handshake) {
      MOEBIUS_CHECK(distributed, has_news || !is_due, "nothing there has answered for {} s", kConnectS);
      if (has_news) greet(call);
    } else if (has_news && call.handshake->is_accepted(call.socket)) {
      made_(call.rank, std::move(call.socket));
      return true;
    } else {
      MOEBIUS_CHECK(distributed, !is_due || call.handshake->has_answered(),
                    "its machine has accepted the connection, and the rank has not answered for {} s: it is stopped, "
                    "or the link to it was cut",
                    answer_s_);
      if (call.handshake->has_answered()) call.due = Deadline::max();
    }
  } catch (const Error& e) {
    set_why_not(call.rank, e.what());
    call.socket.close();
    call.handshake.reset();
    call.due = deadline_in(retry_s(call.attempt++));
  }
  return false;
}

void LinkMaker::begin_attempt(Call& call) {
  const HostPort& to = places_[call.rank];
  if (!call.name) {
    call.name.emplace(to, look_up_);
    call.name_due = deadline_in(look_up_s_);
  }
  const Addresses* const addresses = call.name->wait(Deadline());
  if (addresses == nullptr) {
    MOEBIUS_CHECK(distributed, milliseconds_until(call.name_due) > 0,
                  "the name servers of this machine have not answered for the name for {} s", look_up_s_);
    call.due = deadline_in(kLookS);
    return;
  }
  const NameLookup name = *std::exchange(call.name, std::nullopt);  // the next attempt looks it up again
  call.socket = begin_connect(to, *name.wait(Deadline()), call.attempt);
  MOEBIUS_CHECK(distributed, call.socket.is_open(), "{}", std::strerror(errno));
  call.due = deadline_in(kConnectS);
}

void LinkMaker::greet(Call& call) {
  const int error = connect_error(call.socket);
  MOEBIUS_CHECK(distributed, error == 0, "{}", std::strerror(error));
  call.handshake.emplace(job_, RankGreeting{.rank = rank_, .size = size_}, call.rank);
  call.handshake->greet(call.socket);
  call.due = deadline_in(answer_s_);
  set_why_not(call.rank, "its machine has accepted the connection, and the rank has not answered");
}

}  // namespace moebius
