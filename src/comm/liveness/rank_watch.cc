#include "comm/liveness/rank_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <sstream>

#include "comm/machine.h"
#include "comm/transport/handshake.h"
#include "core/error.h"
#include "core/fault.h"

namespace moebius {
namespace {

constexpr double kAddressS = 1;  // time for one of the addresses of a rank

int parent_of(int rank) { return (rank - 1) / 2; }
int num_children(int rank, int size) { return std::clamp(size - 2 * rank - 1, 0, 2); }

// The place where a rank listens, in the form sent to the others: "machine port
// address address ..."
struct Place {
  std::string machine;
  int port = 0;
  std::vector<std::string> hosts;
};

std::string to_text(const Place& p) {
  std::string text = fmt::format("{} {}", p.machine, p.port);
  for (const std::string& host : p.hosts) text += " " + host;
  return text;
}

Place place_of(const std::string& text) {
  Place p;
  std::istringstream words(text);
  words >> p.machine >> p.port;
  for (std::string host; words >> host;) p.hosts.push_back(host);
  return p;
}

std::string own_machine() {
  std::string name = machine_name();
  std::replace(name.begin(), name.end(), ' ', '_');
  return name.empty() ? "-" : name;
}

// Returns the sockets by child. Connections from other programs are closed.
std::vector<Socket> accept_children(Socket listener, const Job& job, int rank, int count, Deadline deadline) {
  std::vector<Socket> children(count);
  if (count == 0) return children;
  HandshakeAcceptor acceptor(std::move(listener), job, rank);
  for (int have = 0; have < count;) {
    std::optional<HandshakeAcceptor::Member> member = acceptor.next(deadline);
    MOEBIUS_CHECK(distributed, member, "{} of {} ranks did not connect in time{}", count - have, count,
                  acceptor.refused_text());
    const int child = member->greeting.rank - 2 * rank - 1;
    if (child < 0 || child >= count || children[child].is_open()) continue;
    children[child] = std::move(member->socket);
    ++have;
  }
  return children;
}

Socket join_parent(const HostPort& at, const Job& job, int rank, Deadline deadline) {
  Socket s = connect_until(at, deadline);
  complete_handshake(s, job, {.rank = rank}, parent_of(rank), deadline);
  return s;
}

// Connects to the first address of the parent that gives the right answer.
Socket connect_to_parent(const Place& parent, const Job& job, int rank, Deadline deadline) {
  std::string why = fmt::format("rank {} has no address", parent_of(rank));
  std::vector<std::string> hosts = parent.hosts;
  if (parent.machine == own_machine()) hosts.insert(hosts.begin(), "127.0.0.1");
  for (const std::string& host : hosts) {
    try {
      const HostPort at{.host = host, .port = parent.port};
      return join_parent(at, job, rank, std::min(deadline, deadline_in(kAddressS)));
    } catch (const Error& e) {
      why = e.what();
    }
  }
  MOEBIUS_FAIL(distributed, "{}", why);
}

// Runs body and returns the text of its exception; empty when there was none.
std::string failure_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const std::exception& e) {
    return *e.what() == 0 ? "an exception" : e.what();
  }
}

}  // namespace

// --- start ----------------------------------------------------------------------------------------------------------

RankWatch::RankWatch(Control& control, double seconds, Listener listener)
    : rank_(control.rank()), listener_(std::move(listener)), waker_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (control.size() == 1) return;
  fault_point("rank_watch.connect");
  connect(control, seconds);
  watches_ = why_missing_.empty();
  wake();
}

// All ranks make the same calls of control, even when one of them fails.
void RankWatch::connect(Control& control, double seconds) {
  const bool one_machine = [&] {
    const std::vector<std::string> machines = control.gather(own_machine());
    return std::count(machines.begin(), machines.end(), machines[0]) == control.size();
  }();
  const int count = num_children(rank_, control.size());
  const Job job{.secret = control.from_root(control.is_root() ? draw_secret() : ""), .run = "rank_watch"};
  Socket listener;
  Place place{.machine = own_machine()};
  std::string failure = failure_of([&] {
    MOEBIUS_CHECK(distributed, waker_.is_open(), "eventfd: {}", std::strerror(errno));
    fault_point("rank_watch.listen");
    watcher_ = std::jthread([this](const std::stop_token& stop) { run(stop); });  // throws when threads run out
    if (count == 0) return;
    listener = listen_at(0, one_machine);
    place.port = port_of(listener);
    if (!one_machine) place.hosts = own_hosts();
  });
  const std::vector<std::string> places = control.gather(to_text(place));
  if (control.sum(failure.empty() ? 0 : 1) == 0) {
    failure = failure_of([&] {
      const Deadline deadline = deadline_in(seconds);
      auto children = std::async(std::launch::async,
                                 [&] { return accept_children(std::move(listener), job, rank_, count, deadline); });
      if (rank_ > 0) {
        const int parent = parent_of(rank_);
        links_.push_back({.rank = parent, .socket = connect_to_parent(place_of(places[parent]), job, rank_, deadline)});
      }
      int child = 2 * rank_ + 1;
      for (Socket& s : children.get()) links_.push_back({.rank = child++, .socket = std::move(s)});
    });
  }
  const std::vector<std::string> failures = control.gather(failure);
  for (int r = 0; r < control.size() && why_missing_.empty(); ++r)
    if (!failures[r].empty()) why_missing_ = fmt::format("rank {}: {}", r, failures[r]);
  if (!why_missing_.empty()) links_.clear();
}

void RankWatch::wake() {
  const uint64_t one = 1;
  (void)!::write(waker_.descriptor(), &one, sizeof one);
}

// --- watching -------------------------------------------------------------------------------------------------------

void RankWatch::run(const std::stop_token& stop) {
  const std::stop_callback wakes(stop, [this] { wake(); });
  std::vector<pollfd> polled;
  while (!stop.stop_requested()) {
    polled.assign(1, {.fd = waker_.descriptor(), .events = POLLIN, .revents = 0});
    if (watches_)
      for (const Link& link : links_)  // poll skips a negative descriptor
        polled.push_back({.fd = link.is_closed ? -1 : link.socket.descriptor(), .events = POLLIN, .revents = 0});
    if (::poll(polled.data(), polled.size(), -1) <= 0) continue;
    uint64_t times = 0;
    if (polled[0].revents != 0) (void)!::read(waker_.descriptor(), &times, sizeof times);
    for (size_t i = 1; i < polled.size(); ++i)
      if (polled[i].revents != 0) receive(links_[i - 1]);
  }
}

void RankWatch::receive(Link& link) {
  const ssize_t n = ::recv(link.socket.descriptor(), link.bytes.data() + link.num_bytes,
                           link.bytes.size() - link.num_bytes, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    link.is_closed = true;
    return handle_notice({.event = Event::death, .rank = link.rank}, link);
  }
  link.num_bytes += n;
  if (link.num_bytes < link.bytes.size()) return;
  Notice notice;
  std::memcpy(&notice, link.bytes.data(), sizeof notice);
  link.num_bytes = 0;
  if (notice.event == Event::exit) {
    link.is_closed = true;
  } else {
    handle_notice(notice, link);
  }
}

void RankWatch::handle_notice(const Notice& notice, const Link& from) {
  if (quiet_.exchange(true)) return;
  send(notice, &from);
  notice.event == Event::death ? listener_.death(notice.rank) : listener_.ending();
}

// A notice is a few bytes, which any connection accepts at once.
// An error is ignored: poll reports a broken connection.
void RankWatch::send(const Notice& notice, const Link* except) {
  for (const Link& link : links_)
    if (&link != except) (void)!::send(link.socket.descriptor(), &notice, sizeof notice, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// --- ends -----------------------------------------------------------------------------------------------------------

void RankWatch::announce_exit() {
  quiet_ = true;
  send({.event = Event::exit, .rank = rank_});
}

void RankWatch::announce_abort() {
  if (!quiet_.exchange(true)) send({.event = Event::abort, .rank = rank_});
}

}  // namespace moebius
