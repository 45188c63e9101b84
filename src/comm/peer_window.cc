#include "comm/peer_window.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "comm/gpu/gpu_identity.h"
#include "comm/liveness/stall_aware_deadline.h"
#include "comm/machine.h"
#include "device/accelerator.h"

namespace moebius {
namespace {

std::atomic_ref<uint64_t> flag_at(std::byte* base, int rank) {
  return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(base)[rank]);
}

// A rank tells this to all others before it sends handles. Texts end in zeros.
struct Introduction {
  ProcessId process;
  char machine[160] = {};
  char gpu[48] = {};
};

struct Answer {
  char why[400] = {};  // it cannot reach a rank; empty: it reaches all
};

template <size_t kSize>
void put(char (&to)[kSize], const std::string& text) {
  std::memcpy(to, text.data(), std::min(text.size(), kSize - 1));
}

template <class T>
std::vector<T> gathered(Group& group, const T& mine) {
  ThreadPool pool(1);
  Stream host(DeviceKind::cpu, pool);
  std::vector<T> all(group.size());
  const auto bytes = [](const void* p, int64_t n) {
    return tensor_of(static_cast<uint8_t*>(const_cast<void*>(p)), {n});
  };
  group.all_gather(host, bytes(all.data(), std::ssize(all) * int64_t{sizeof(T)}), bytes(&mine, sizeof(T)));
  return all;
}

// Returns what each rank has for this one. `mine` is by rank.
std::vector<PeerHandle> exchanged(Group& group, std::vector<PeerHandle>& mine) {
  ThreadPool pool(1);
  Stream host(DeviceKind::cpu, pool);
  const int64_t n = group.size(), bytes = sizeof(PeerHandle);
  std::vector<PeerHandle> theirs(n);
  const std::vector<int64_t> one(n, 1);
  const auto rows = [&](std::vector<PeerHandle>& x) {
    return tensor_of(reinterpret_cast<uint8_t*>(x.data()), {n, bytes});
  };
  group.all_to_all_v(host, {.out = rows(theirs), .in = rows(mine), .recv_rows = one, .send_rows = one});
  return theirs;
}

}  // namespace

int64_t PeerWindow::control_bytes(int num_ranks) {
  const RoundFlags flags{.size = num_ranks};
  return div_ceil((flags.bases() + num_ranks) * 8, 256) * 256;
}

PeerWindow::PeerWindow(Stream& s, Group& group, const PeerMemory& memory, const Tensor& window)
    : group_(group),
      flags_{.rank = group.rank(), .size = group.size(), .window = window.data},
      window_(window),
      memories_(group.size()),
      bases_(group.size()) {
  MOEBIUS_ASSERT(window.num_bytes() >= control_bytes(group.size()) && memory.data() != nullptr);
  open(memory, static_cast<std::byte*>(window.data) - static_cast<std::byte*>(memory.data()));
  std::vector<int64_t> addresses;
  for (std::byte* base : bases_) addresses.push_back(reinterpret_cast<int64_t>(base));
  copy_to_device(s, bases_W().data, addresses.data(), bases_W().num_bytes());
  if (s.device() == DeviceKind::cuda) {
    synchronize(s);
    gpu_ = std::make_unique<GpuRounds>(s, flags_, group.timeout_s(), [this] { look(); });
  }
  traffic_ = gpu_ ? gpu_->traffic() : std::make_shared<PeerTraffic>();
  group.count_also(traffic_);
  group.barrier();
}

PeerWindow::~PeerWindow() = default;

void PeerWindow::open(const PeerMemory& memory, int64_t offset) {
  const bool on_gpu = window_.device == DeviceKind::cuda;
  Introduction mine{.process = this_process()};
  put(mine.machine, machine_name());
  if (on_gpu) put(mine.gpu, gpu_identity_of(memory.data()));
  const std::vector<Introduction> ranks = gathered(group_, mine);
  Answer answer;
  std::vector<PeerHandle> handles(group_.size());
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    if (std::strcmp(ranks[r].machine, mine.machine) == 0)
      handles[r] = memory.handle_for(ranks[r].process);
    else
      put(answer.why,
          fmt::format("{} is on another machine than {}", group_.rank_name(r), group_.rank_name(group_.rank())));
    shares_gpu_ |= on_gpu && std::strcmp(ranks[r].gpu, mine.gpu) == 0;
  }
  std::vector<PeerHandle> theirs = exchanged(group_, handles);
  const std::vector<int64_t> offsets = gathered(group_, offset);
  for (int r = 0; r < group_.size(); ++r) {
    if (r != group_.rank() && answer.why[0] == 0) {
      try {
        memories_[r] = PeerMemory(theirs[r]);
      } catch (const Error& e) {
        put(answer.why, fmt::format("{} cannot reach the memory of {}: {}", group_.rank_name(group_.rank()),
                                    group_.rank_name(r), e.what()));
      }
    }
    bases_[r] = r == group_.rank() ? static_cast<std::byte*>(window_.data)
                                   : static_cast<std::byte*>(memories_[r].data()) + offsets[r];
  }
  for (const Answer& each : gathered(group_, answer)) {
    MOEBIUS_CHECK(usage, each.why[0] == 0,
                  "parallel.dispatcher = \"direct\" writes to the memory of all ranks of {}: {}; choose another "
                  "dispatcher, or a layout that has these ranks on one machine",
                  group_.name(), each.why);
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
  uint64_t& count = reinterpret_cast<uint64_t*>(bases_[me])[flags_.count()];
  ++count;
  for (int i = 1; i < n; ++i) flag_at(bases_[(me + i) % n], me).store(count, std::memory_order_release);
  for (int i = 1; i < n; ++i) wait_for((me + i) % n, count, place);
}

// Polls, since the flag may be of another process. A wait that takes longer looks after the other ranks.
void PeerWindow::wait_for(int rank, uint64_t round, const RoundPlace& place) {
  constexpr int kSpins = 200, kYields = 200;
  const std::atomic_ref<uint64_t> flag = flag_at(bases_[group_.rank()], rank);
  const auto has_come = [&] { return flag.load(std::memory_order_acquire) >= round; };
  for (int i = 0; i < kSpins; ++i)
    if (has_come()) return;
  for (int i = 0; i < kYields; ++i) {
    if (has_come()) return;
    std::this_thread::yield();
  }
  StallAwareDeadline deadline(group_.timeout_s());
  for (auto pause = std::chrono::microseconds(20); !has_come();
       pause = std::min(pause * 2, std::chrono::microseconds(1000))) {
    group_.check();
    if (deadline.is_over()) fail(rank, round, flag.load(std::memory_order_acquire), place);
    std::this_thread::sleep_for(pause);
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
  if (shares_gpu_ && !s.accelerator().capture()) {
    copy_to_host(s, &traffic_->sent_bytes, sent_1().data, sizeof(int64_t));
    return group_.barrier();
  }
  const auto found = std::find(places_.begin(), places_.end(), place);
  if (found == places_.end()) places_.push_back(place);
  gpu_->launch(s, static_cast<int>(found - places_.begin()));
}

void PeerWindow::look() {
  if (const std::optional<RoundReport> report = gpu_->report())
    fail(report->rank, report->expected, report->seen, places_[report->place]);
  group_.check();
}

}  // namespace moebius
