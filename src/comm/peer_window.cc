#include "comm/peer_window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <thread>

#include "comm/liveness/stall_aware_deadline.h"
#include "device/accelerator.h"

namespace moebius {
namespace {

std::atomic_ref<uint64_t> flag_at(std::byte* base, int rank) {
  return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(base)[rank]);
}

}  // namespace

int64_t PeerWindow::control_bytes(int num_ranks) {
  const RoundFlags flags{.size = num_ranks};
  return div_ceil((flags.bases() + num_ranks) * 8, 256) * 256;
}

PeerWindow::PeerWindow(Stream& s, Group& group, const PeerMemory& memory, const Tensor& window, bool waits_on_host)
    : group_(group),
      flags_{.rank = group.rank(), .size = group.size(), .window = window.data},
      window_(window),
      waits_on_host_(waits_on_host) {
  MOEBIUS_ASSERT(window.num_bytes() >= control_bytes(group.size()) && memory.data() != nullptr);
  pages_ = open_peers(group, memory, window);
  MOEBIUS_CHECK(usage, pages_.why_no_access.empty(),
                "parallel.dispatcher: direct and two_level write to the memory of all ranks of {}: {}; choose another "
                "dispatcher, a layout that has these ranks on one machine, or with two_level another "
                "parallel.ranks_per_node",
                group.name(), pages_.why_no_access);
  std::vector<int64_t> addresses;
  for (std::byte* begin : pages_.windows) addresses.push_back(reinterpret_cast<int64_t>(begin));
  copy_to_device(s, bases_W().data, addresses.data(), bases_W().num_bytes());
  if (s.device() == DeviceKind::cuda) {
    synchronize(s);
    gpu_ = std::make_unique<GpuRounds>(
        s, flags_, [this] { return group_.timeout_s(); }, [this] { check_peers(); }, [this] { throw_reported(); });
  }
  traffic_ = gpu_ ? gpu_->traffic() : std::make_shared<PeerTraffic>();
  group.count_also(traffic_);
  group.barrier();
}

// A GPU's memory must not be freed while another process has it open.
PeerWindow::~PeerWindow() {
  if (!gpu_ || std::uncaught_exceptions() > 0) return;
  pages_.memories.clear();
  try {
    group_.barrier();
  } catch (const Error&) {  // another rank has failed, and its error ends the run
  }
}

Tensor PeerWindow::words(int64_t first, int64_t count) const {
  return {.data = static_cast<std::byte*>(window_.data) + first * 8,
          .shape = {count},
          .dtype = DType::i64,
          .device = window_.device};
}

Tensor PeerWindow::bases_W() const { return words(flags_.bases(), group_.size()); }
Tensor PeerWindow::sent_1() const { return words(flags_.sent(), 1); }

void PeerWindow::round(Stream& s, const RoundPlace& place) {
  if (s.device() == DeviceKind::cuda) return round_on_gpu(s, place);
  const double begin = now_us();
  round_on_host(place);
  traffic_->sent_bytes = *sent_1().ptr<int64_t>();
  traffic_->waited_ns += std::llround((now_us() - begin) * 1e3);
}

void PeerWindow::round_on_host(const RoundPlace& place) {
  const int me = group_.rank(), n = group_.size();
  uint64_t& count = reinterpret_cast<uint64_t*>(pages_.windows[me])[flags_.count()];
  ++count;
  for (int i = 1; i < n; ++i) flag_at(pages_.windows[(me + i) % n], me).store(count, std::memory_order_release);
  for (int i = 1; i < n; ++i) wait_for((me + i) % n, count, place);
}

// Polls, since another process may write the flag. A longer wait checks the other ranks.
void PeerWindow::wait_for(int rank, uint64_t round, const RoundPlace& place) {
  constexpr int kSpins = 200, kYields = 200;
  const std::atomic_ref<uint64_t> flag = flag_at(pages_.windows[group_.rank()], rank);
  const auto has_arrived = [&] { return flag.load(std::memory_order_acquire) >= round; };
  for (int i = 0; i < kSpins; ++i)
    if (has_arrived()) return;
  for (int i = 0; i < kYields; ++i) {
    if (has_arrived()) return;
    std::this_thread::yield();
  }
  StallAwareDeadline deadline(group_.timeout_s());
  for (auto pause = std::chrono::microseconds(20); !has_arrived();
       pause = std::min(pause * 2, std::chrono::microseconds(1000))) {
    check_others(rank, round, place);
    if (deadline.is_over()) fail(rank, round, flag.load(std::memory_order_acquire), place);
    std::this_thread::sleep_for(pause);
  }
}

// If another rank has failed, throws its error, with the round in which this rank waits. A flag that has arrived in
// the meantime ends the wait instead: only a wait that does not end is reported.
void PeerWindow::check_others(int rank, uint64_t round, const RoundPlace& place) {
  try {
    group_.check();
  } catch (const Error& e) {
    const uint64_t seen = flag_at(pages_.windows[group_.rank()], rank).load(std::memory_order_acquire);
    if (seen >= round) return;
    throw Error(e.kind(),
                fmt::format("{} of {}: {} waits for {}: round {} of group {} is expected of it, and {} was seen; {}",
                            place.phase, place.layer, group_.rank_name(group_.rank()), group_.rank_name(rank), round,
                            group_.name(), seen, e.what()));
  }
}

void PeerWindow::fail(int rank, uint64_t expected, uint64_t seen, const RoundPlace& place) const {
  MOEBIUS_FAIL(distributed,
               "{} of {}: {} has waited for {} s for {}, which has not come: round {} of group {} is expected of it, "
               "and {} was seen",
               place.phase, place.layer, group_.rank_name(group_.rank()), group_.timeout_s(), group_.rank_name(rank),
               expected, group_.name(), seen);
}

// --- on a GPU -------------------------------------------------------------------------------------------------------

void PeerWindow::round_on_gpu(Stream& s, const RoundPlace& place) {
  const bool syncs_on_host = waits_on_host_ || pages_.shares_gpu || group_.stages_gpu_memory();
  if (syncs_on_host && !s.accelerator().capture()) {
    copy_to_host(s, &traffic_->sent_bytes, sent_1().data, sizeof(int64_t));
    return group_.barrier();
  }
  const auto found = std::find(places_.begin(), places_.end(), place);
  if (found == places_.end()) places_.push_back(place);
  gpu_->launch(s, static_cast<int>(found - places_.begin()));
}

void PeerWindow::check_peers() {
  throw_reported();
  group_.check();
}

void PeerWindow::throw_reported() {
  if (const std::optional<RoundReport> report = gpu_->report())
    fail(report->rank, report->expected, report->seen, places_[report->place]);
}

}  // namespace moebius
