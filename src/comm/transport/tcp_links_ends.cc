// The part of TcpLinks that handles the end of ranks, and reports the state of connections.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

#include "comm/transport/link_measurement.h"
#include "comm/transport/tcp_links.h"

namespace moebius {

void TcpLinks::queue_text(int peer, const Header& header, const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  OutFrame frame{.header = header, .payload_bytes = std::ssize(text), .own = {bytes.begin(), bytes.end()}};
  frame.payload = frame.own.data();
  queue(peer, std::move(frame));
}

void TcpLinks::note_failed(int rank) {
  if (first_failed_) return;
  first_failed_ = rank;
  if (rank_ != 0) return;
  const std::string& why = links_[rank].peer.failure;
  const Header lost{.kind = Kind::lost, .channel = rank},
      failure{.kind = Kind::failure, .channel = rank, .num_bytes = std::ssize(why)};
  for (const int r : std::vector<int>(open_))
    if (r != rank) queue_text(r, why.empty() ? lost : failure, why);
}

void TcpLinks::send_own_error(uint64_t hash) {
  const std::lock_guard lock(mutex_);
  queue(0, {.header = {.kind = Kind::own_error, .number = static_cast<int64_t>(hash)}});
}

void TcpLinks::send_error_reply(int rank, ErrorReply reply) {
  const std::lock_guard lock(mutex_);
  queue(rank, {.header = {.kind = Kind::error_reply, .number = reply.is_repeated}});
}

void TcpLinks::send_failure(const std::string& why) {
  const std::lock_guard lock(mutex_);
  for (const int r : open_) queue_text(r, {.kind = Kind::failure, .channel = rank_, .num_bytes = std::ssize(why)}, why);
}

void TcpLinks::send_left() {
  const std::lock_guard lock(mutex_);
  for (const int r : open_) queue(r, {.header = {.kind = Kind::left}});
}

void TcpLinks::send_all_left() {
  const std::lock_guard lock(mutex_);
  for (const int r : open_) queue(r, {.header = {.kind = Kind::all_left}});
}

void TcpLinks::probe(std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  for (const int rank : ranks)
    if (links_[rank].is_made) queue(rank, {.header = {.kind = Kind::probe}});
}

// If the other end's receive window is closed, as with a stopped process, nothing is in flight, and the end does not
// count as silent.
double TcpLinks::silent_s(int rank) const {
  tcp_info info{};
  socklen_t size = sizeof info;
  const Link& link = links_[rank];
  if (!link.socket.is_open()) return 0;
  if (::getsockopt(link.socket.descriptor(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return info.tcpi_unacked > 0 ? info.tcpi_last_ack_recv * 1e-3 : 0;
}

std::pair<std::string, std::string> TcpLinks::addresses(int rank) const {
  const std::lock_guard lock(mutex_);
  const Socket& socket = links_[rank].socket;
  return {own_host(socket), peer_host(socket)};
}

std::vector<LinkMeasurement> TcpLinks::measurements() {
  const std::lock_guard lock(mutex_);
  std::vector<LinkMeasurement> all;
  for (const int r : open_) {
    all.push_back(measure_link(links_[r].socket));
    LinkMeasurement& figures = all.back();
    figures.peer = r;
    const auto set_rate = [&](BusyTime& time) {
      figures.bytes_per_s = static_cast<double>(time.bytes) / time.seconds;
      figures.is_filled = true;
      time.bytes = 0;
      time.seconds = 0;
    };
    Link& link = links_[r];
    if (link.full.bytes >= kEnoughBytes && link.full.seconds > 0)
      set_rate(link.full);
    else if (link.awaited.bytes > 0)
      set_rate(link.awaited);
    link.awaited = {};
  }
  return all;
}

bool TcpLinks::nothing_to_send() const {
  return std::all_of(open_.begin(), open_.end(), [this](int r) { return links_[r].out.empty(); });
}

void TcpLinks::watch(double stall_s, std::function<void(int failed_rank)> on_stall) {
  const std::lock_guard lock(mutex_);
  stall_s_ = stall_s;
  on_stall_ = std::move(on_stall);
  rank_may_stay_away_ = StallAwareDeadline(stall_s_);
}

void TcpLinks::look_for_stall(std::unique_lock<std::mutex>& lock) {
  if (!on_stall_ || rank_moves_) return;
  if (!first_failed_) {
    rank_may_stay_away_ = StallAwareDeadline(stall_s_);
  } else if (rank_may_stay_away_.is_over()) {
    const auto on_stall = std::exchange(on_stall_, nullptr);
    lock.unlock();
    on_stall(*first_failed_);
    lock.lock();
  }
}

}  // namespace moebius
