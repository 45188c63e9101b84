#include "comm/transport/tcp_links.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/transport/link_measurement.h"
#include "core/error.h"
#include "core/start_thread.h"

namespace moebius {
namespace {

constexpr int kLookMs = 500;  // time after which the mover checks for a stall
// The rank itself moves most messages, because it waits for them as soon as they are posted.
// While it posts often the mover is not woken for each message, which would cost more than the
// message. It checks for the others after naps.
constexpr auto kNap = std::chrono::milliseconds(1);
constexpr auto kOften = std::chrono::milliseconds(20);
// A waiting rank polls this often before it sleeps, since the answer may come within microseconds.
// Between polls it lets other threads run: one of them may be the rank that it waits for.
constexpr int kSpins = 50;
constexpr int kReadsAtOnce = 16;  // reads from one connection before the next one's turn
constexpr int64_t kSinkBytes = 1 << 16;

}  // namespace

TcpLinks::TcpLinks(int rank, std::vector<Socket> sockets, std::function<void(int rank)> connect)
    : rank_(rank), links_(sockets.size()), connect_(std::move(connect)) {
  for (Socket* waker : {&mover_waker_, &rank_waker_}) {
    *waker = Socket(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    MOEBIUS_CHECK(distributed, waker->is_open(), "tcp: eventfd: {}", std::strerror(errno));
  }
  for (int r = 0; r < size(); ++r) {
    links_[r].is_made = sockets[r].is_open();
    if (links_[r].is_made) open_.push_back(r);
    links_[r].socket = std::move(sockets[r]);
  }
  mover_ = start_thread([this] { return std::thread([this] { run_mover(); }); });
}

TcpLinks::~TcpLinks() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_mover();
  }
  mover_.join();
}

// --- connections ----------------------------------------------------------------------------------------------------

// Both ends of a message request the connection, so the higher rank requests it too, unless it ends first.
void TcpLinks::ask_for(int peer) {
  Link& link = links_[peer];
  if (link.is_made || link.is_asked_for || peer > rank_) return;
  link.is_asked_for = true;
  connect_(peer);
}

void TcpLinks::add(int rank, Socket socket) {
  const std::lock_guard lock(mutex_);
  Link& link = links_[rank];
  MOEBIUS_ASSERT(!link.is_made);
  link.is_made = true;
  link.socket = std::move(socket);
  open_.push_back(rank);
  send_some(link);
  // The thread that polls does not poll this socket yet.
  rank_moves_ ? wake(rank_waker_) : wake_mover();
}

bool TcpLinks::is_connected(int rank) const {
  const std::lock_guard lock(mutex_);
  return links_[rank].is_made;
}

int TcpLinks::num_connections() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(std::count_if(links_.begin(), links_.end(), [](const Link& link) { return link.is_made; }));
}

// --- messages -------------------------------------------------------------------------------------------------------

void TcpLinks::post(TcpEnd& end) {
  const std::lock_guard lock(mutex_);
  ++num_open_;
  last_post_ = std::chrono::steady_clock::now();
  end.sends ? post_send(end) : post_receive(end);
  ask_for(end.peer);
  if (end.state == TcpEnd::State::waiting && !rank_moves_) wake_mover();
}

void TcpLinks::post_send(TcpEnd& end) {
  Link& link = links_[end.peer];
  Channel& channel = link.channels[end.channel];
  end.number = channel.num_sent++;
  Header header{.channel = end.channel, .number = end.number, .num_bytes = end.num_bytes};
  if (end.num_bytes <= kEagerBytes) {
    OutFrame frame{.header = header, .payload = end.data, .payload_bytes = end.num_bytes, .end = &end};
    if (!link.is_made && link.kept_bytes + end.num_bytes <= kMaxKeptBytes) keep(link, frame);
    queue(end.peer, std::move(frame));
  } else {
    header.kind = Kind::offer;
    channel.offered[end.number] = &end;
    queue(end.peer, {.header = header});
  }
}

void TcpLinks::post_receive(TcpEnd& end) {
  Link& link = links_[end.peer];
  Channel& channel = link.channels[end.channel];
  end.number = channel.num_received++;
  if (channel.unexpected.empty()) {
    channel.receives.push_back(&end);
  } else {
    take_unexpected(link, channel, end);
  }
}

void TcpLinks::take_unexpected(Link& link, Channel& channel, TcpEnd& end) {
  UnexpectedMessage& unexpected = channel.unexpected.front();
  if (unexpected.header.kind == Kind::offer) {
    accept_offer(channel, end, unexpected.header);
  } else if (sizes_agree(end, unexpected.header.num_bytes)) {
    const bool coming = link.unexpected == &unexpected;
    const int64_t have = coming ? link.got - static_cast<int64_t>(sizeof(Header)) : end.num_bytes;
    std::copy_n(unexpected.bytes.data(), have, end.data);
    if (coming) {
      link.receiver = &end;
      link.into = end.data;
    } else {
      finish(end, TcpEnd::State::ended);
    }
  } else if (link.unexpected == &unexpected) {
    link.into = nullptr;
  }
  if (link.unexpected == &unexpected) link.unexpected = nullptr;
  channel.unexpected.pop_front();
}

void TcpLinks::accept_offer(Channel& channel, TcpEnd& end, const Header& offer) {
  if (!sizes_agree(end, offer.num_bytes)) return;
  channel.accepted[end.number] = &end;
  queue(end.peer, {.header = {.kind = Kind::accept, .channel = end.channel, .number = end.number}});
}

bool TcpLinks::sizes_agree(TcpEnd& end, int64_t peer_bytes) {
  if (end.num_bytes == peer_bytes) return true;
  end.peer_bytes = peer_bytes;
  finish(end, TcpEnd::State::mismatched);
  return false;
}

void TcpLinks::finish(TcpEnd& end, TcpEnd::State state) {
  end.state = state;
  --num_open_;
}

void TcpLinks::withdraw(TcpEnd& end) {
  const std::lock_guard lock(mutex_);
  if (end.state != TcpEnd::State::waiting) return;
  finish(end, TcpEnd::State::ended);
  Link& link = links_[end.peer];
  Channel& channel = link.channels[end.channel];
  std::erase(channel.receives, &end);
  channel.offered.erase(end.number);
  channel.accepted.erase(end.number);
  if (link.receiver == &end) {
    link.receiver = nullptr;
    link.into = nullptr;
  }
  for (OutFrame& frame : link.out)  // a frame that has begun to leave must be completed, since others follow
    if (frame.end == &end) own_payload(frame);
}

void TcpLinks::own_payload(OutFrame& frame) {
  frame.own.assign(frame.payload, frame.payload + frame.payload_bytes);
  frame.payload = frame.own.data();
  frame.end = nullptr;
}

void TcpLinks::keep(Link& link, OutFrame& frame) {
  link.kept_bytes += frame.payload_bytes;
  finish(*frame.end, TcpEnd::State::ended);
  own_payload(frame);
}

// --- frames out -----------------------------------------------------------------------------------------------------

void TcpLinks::queue(int peer, OutFrame frame) {
  Link& link = links_[peer];
  if (link.is_made && !link.socket.is_open()) return;  // it broke
  link.out.push_back(std::move(frame));
  if (link.is_made && link.out.size() == 1) send_some(link);
}

void TcpLinks::send_some(Link& link) {
  constexpr int64_t kHeader = sizeof(Header);
  while (!link.out.empty()) {
    OutFrame& frame = link.out.front();
    const int64_t of_header = std::min(frame.sent, kHeader), of_payload = frame.sent - of_header;
    std::array<iovec, 2> parts{
        iovec{reinterpret_cast<std::byte*>(&frame.header) + of_header, static_cast<size_t>(kHeader - of_header)},
        iovec{const_cast<std::byte*>(frame.payload) + of_payload,  // it is only read
              static_cast<size_t>(frame.payload_bytes - of_payload)}};
    const msghdr message{.msg_iov = parts.data(), .msg_iovlen = parts.size()};
    const ssize_t n = ::sendmsg(link.socket.descriptor(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return note_busy(link.full);
    if (n < 0) return link.out.clear();  // what the peer sent before it ended can still be read
    frame.sent += n;
    link.full.bytes_since += n;
    if (frame.sent < kHeader + frame.payload_bytes) continue;
    if (frame.end != nullptr) finish(*frame.end, TcpEnd::State::ended);
    link.out.pop_front();
  }
  link.full.since.reset();
}

// Measures the bytes that the link moved: those that left between two times at which the buffer was full, or those that
// arrived between two times at which there was nothing more to read.
void TcpLinks::note_busy(BusyTime& time) {
  const auto now = std::chrono::steady_clock::now();
  if (time.since) {
    time.bytes += time.bytes_since;
    time.seconds += std::chrono::duration<double>(now - *time.since).count();
  }
  time.since = now;
  time.bytes_since = 0;
}

// Adds the time of the frame that has arrived to those that show the rate of the link.
void TcpLinks::note_awaited_frame(Link& link) {
  const BusyTime frame = std::exchange(link.of_frame, {});
  if (frame.bytes < kLongBytes) return;
  if (!is_rate_of_link(measure_link(link.socket).round_trip_s, frame.bytes, frame.seconds)) return;
  link.awaited.bytes += frame.bytes;
  link.awaited.seconds += frame.seconds;
}

// --- frames in ------------------------------------------------------------------------------------------------------

void TcpLinks::receive_some(int peer) {
  for (int i = 0; i < kReadsAtOnce; ++i)
    if (!receive_once(peer)) return;
}

// Returns whether there may be more to receive.
bool TcpLinks::receive_once(int peer) {
  constexpr int64_t kHeader = sizeof(Header);
  Link& link = links_[peer];
  std::array<std::byte, kSinkBytes> sink;
  std::byte* to = reinterpret_cast<std::byte*>(&link.header) + link.got;
  int64_t room = kHeader - link.got;
  if (room <= 0) {
    const int64_t of_payload = link.got - kHeader;
    room = link.header.num_bytes - of_payload;
    to = link.into != nullptr ? link.into + of_payload : sink.data();
    if (link.into == nullptr) room = std::min(room, kSinkBytes);
  }
  const ssize_t n = ::recv(link.socket.descriptor(), to, room, MSG_DONTWAIT);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && errno == EAGAIN) {
    if (link.receiver != nullptr) note_busy(link.of_frame);  // else nobody waits, and the next look may be late
    return false;
  }
  if (n <= 0) {
    lose(peer);
    return false;
  }
  link.got += n;
  link.of_frame.bytes_since += n;
  if (link.got == kHeader) begin_payload(peer);
  const bool has_payload =
      link.header.kind == Kind::message || link.header.kind == Kind::body || link.header.kind == Kind::failure;
  if (link.got < kHeader + (has_payload ? link.header.num_bytes : 0)) return true;
  note_awaited_frame(link);
  end_payload(peer);
  return true;
}

void TcpLinks::begin_payload(int peer) {
  Link& link = links_[peer];
  const Header& header = link.header;
  link.into = nullptr;
  link.receiver = nullptr;
  link.unexpected = nullptr;
  if (header.kind == Kind::failure) {
    link.text.resize(header.num_bytes);
    link.into = link.text.data();
    return;
  }
  if (header.kind != Kind::message && header.kind != Kind::body) return;
  Channel& channel = link.channels[header.channel];
  if (header.kind == Kind::message && channel.receives.empty()) {
    link.unexpected = &channel.unexpected.emplace_back(UnexpectedMessage{.header = header, .bytes = {}});
    link.unexpected->bytes.resize(header.num_bytes);
    link.into = link.unexpected->bytes.data();
  } else if (header.kind == Kind::message) {
    TcpEnd& end = *channel.receives.front();
    channel.receives.pop_front();
    if (sizes_agree(end, header.num_bytes)) link.receiver = &end;
  } else if (const auto it = channel.accepted.find(header.number); it != channel.accepted.end()) {
    link.receiver = it->second;
    channel.accepted.erase(it);
  }
  if (link.receiver != nullptr) link.into = link.receiver->data;
}

void TcpLinks::end_payload(int peer) {
  Link& link = links_[peer];
  switch (link.header.kind) {
    case Kind::message:
    case Kind::body:
      if (link.receiver != nullptr) finish(*link.receiver, TcpEnd::State::ended);
      break;
    case Kind::offer:
      take_offer(peer);
      break;
    case Kind::accept:
      take_accept(peer);
      break;
    case Kind::own_error:
      link.peer.own_error = static_cast<uint64_t>(link.header.number);
      break;
    case Kind::error_reply:
      error_reply_ = ErrorReply{.is_repeated = link.header.number != 0};
      break;
    case Kind::failure:
      links_[link.header.channel].peer.failure.assign(reinterpret_cast<const char*>(link.text.data()),
                                                      link.text.size());
      note_failed(link.header.channel);
      break;
    case Kind::lost:
      if (Peer& about = links_[link.header.channel].peer; about.state == Peer::State::here) {
        about.state = Peer::State::lost;
        note_failed(link.header.channel);
      }
      break;
    case Kind::left:
      link.peer.state = Peer::State::left;
      break;
    case Kind::all_left:
      have_all_left_ = true;
      break;
    case Kind::probe:
      break;
  }
  link.got = 0;
  link.into = nullptr;
  link.receiver = nullptr;
  link.unexpected = nullptr;
}

void TcpLinks::take_offer(int peer) {
  Link& link = links_[peer];
  Channel& channel = link.channels[link.header.channel];
  if (channel.receives.empty()) {
    channel.unexpected.push_back({.header = link.header, .bytes = {}});
    return;
  }
  TcpEnd& end = *channel.receives.front();
  channel.receives.pop_front();
  accept_offer(channel, end, link.header);
}

void TcpLinks::take_accept(int peer) {
  Link& link = links_[peer];
  Channel& channel = link.channels[link.header.channel];
  const auto it = channel.offered.find(link.header.number);
  if (it == channel.offered.end()) return;  // withdrawn
  TcpEnd& end = *it->second;
  channel.offered.erase(it);
  queue(peer, {.header = {.kind = Kind::body, .channel = end.channel, .number = end.number, .num_bytes = end.num_bytes},
               .payload = end.data,
               .payload_bytes = end.num_bytes,
               .end = &end});
}

void TcpLinks::lose(int peer) {
  Link& link = links_[peer];
  link.out.clear();
  link.socket.close();
  std::erase(open_, peer);
  if (link.peer.state != Peer::State::here) return;
  link.peer.state = Peer::State::lost;
  note_failed(peer);
}

// --- moving ---------------------------------------------------------------------------------------------------------

void TcpLinks::pump(std::unique_lock<std::mutex>& lock, int timeout_ms, bool by_rank) {
  const int waker = (by_rank ? rank_waker_ : mover_waker_).descriptor();
  const std::vector<int> ranks = open_;  // others may be added meanwhile
  std::vector<pollfd> polled{{.fd = waker, .events = POLLIN, .revents = 0}};
  for (const int r : ranks) {
    const short events = static_cast<short>(POLLIN | (links_[r].out.empty() ? 0 : POLLOUT));
    polled.push_back({.fd = links_[r].socket.descriptor(), .events = events, .revents = 0});
  }
  lock.unlock();
  const int ready = ::poll(polled.data(), polled.size(), timeout_ms);
  if (ready == 0 && timeout_ms == 0 && by_rank) std::this_thread::yield();
  lock.lock();
  uint64_t times = 0;
  if (polled[0].revents != 0) (void)!::read(waker, &times, sizeof times);
  if (ready <= 0 || (!by_rank && rank_moves_)) return;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const short events = polled[i + 1].revents;
    if (events & POLLOUT) send_some(links_[ranks[i]]);
    if (links_[ranks[i]].socket.is_open() && (events & ~POLLOUT)) receive_some(ranks[i]);
  }
}

bool TcpLinks::move_until(double seconds, const std::function<bool()>& done) {
  struct Moving {
    explicit Moving(TcpLinks& links) : self(links) { self.rank_moves_ = true; }
    ~Moving() {
      self.rank_moves_ = false;
      self.rank_may_stay_away_ = StallAwareDeadline(self.stall_s_);
      if (!self.nothing_on_its_way()) self.wake_mover();
    }
    TcpLinks& self;
  };
  std::unique_lock lock(mutex_);
  const Moving moving(*this);
  StallAwareDeadline deadline(seconds);
  for (int i = 0; !done(); ++i) {
    if (deadline.is_over()) return false;
    pump(lock, i < kSpins ? 0 : deadline.milliseconds_to_sleep(), /*by_rank=*/true);
  }
  return true;
}

void TcpLinks::wake(const Socket& waker) {
  const uint64_t one = 1;
  (void)!::write(waker.descriptor(), &one, sizeof one);
}

void TcpLinks::wake_mover() {
  if (mover_naps_) return;
  if (mover_polls_) {
    wake(mover_waker_);
  } else {
    parked_.notify_one();
  }
}

void TcpLinks::run_mover() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (rank_moves_ || nothing_on_its_way()) {
      mover_naps_ = std::chrono::steady_clock::now() - last_post_ < kOften;
      parked_.wait_for(lock, mover_naps_ ? kNap : std::chrono::milliseconds(kLookMs));
      mover_naps_ = false;
      if (!rank_moves_ && !stop_) pump(lock, 0, /*by_rank=*/false);
    } else {
      mover_polls_ = true;
      pump(lock, kLookMs, /*by_rank=*/false);
      mover_polls_ = false;
    }
    look_for_stall(lock);
  }
}

}  // namespace moebius
