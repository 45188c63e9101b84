// A round on a GPU: one block, whose threads store this rank's count in the windows of the others, and wait
// for theirs.
#include <cmath>
#include <cstring>
#include <new>

#include "comm/gpu/peer_round.h"
#include "device/cuda/cuda.h"
#include "device/gpu_wait_watchdog.h"

namespace moebius {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kRoundsOfALook = 16;  // in every 16th round a kernel reads whether the host has ended the kernels

// The report of a late round, in pinned memory, which the host and the GPU can access. `state` is written last.
struct Report {
  enum State : uint32_t { fine = 0, late = 1 };
  uint32_t state = fine;
  uint32_t ended = 0;       // the host sets it: kernels that wait end
  uint64_t timeout_ns = 0;  // the host sets it: the time for which a kernel waits
  int32_t rank = 0, place = 0;
  uint64_t expected = 0, seen = 0;
  PeerTraffic traffic;
};

__device__ __forceinline__ void store_release(uint64_t* to, uint64_t x) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
  uint64_t x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Returns whether the rank arrived in time. The first thread whose wait was too long writes the report.
__device__ bool wait_for(const uint64_t* flag, uint64_t count, int rank, int place, unsigned long long* claim,
                         Report* report) {
  const volatile Report* seen_by_host = report;
  const uint64_t begin = nanoseconds();
  for (int i = 1;; ++i) {
    const uint64_t seen = load_acquire(flag);
    if (seen >= count) return true;
    if (i % 256 != 0) continue;
    if (seen_by_host->ended) {
      atomicExch(claim, 1ull);
      return false;
    }
    if (seen_by_host->state != Report::fine) return false;
    if (nanoseconds() - begin < seen_by_host->timeout_ns) continue;
    if (atomicExch(claim, 1ull) != 0) return false;
    report->rank = rank;
    report->place = place;
    report->expected = count;
    report->seen = seen;
    __threadfence_system();
    const_cast<volatile Report*>(report)->state = Report::late;
    return false;
  }
}

__global__ void __launch_bounds__(kThreads) round_kernel(RoundFlags flags, int place, Report* report) {
  auto* own = static_cast<uint64_t*>(flags.window);
  const uint64_t* bases = own + flags.bases();
  auto* claim = reinterpret_cast<unsigned long long*>(own + flags.late());
  if (*claim != 0) return;  // this rank's count stays unwritten, so that the others detect the failure too
  const uint64_t count = own[flags.count()] + 1, begin = nanoseconds();
  __threadfence_system();
  for (int r = threadIdx.x; r < flags.size; r += kThreads)
    if (r != flags.rank) store_release(reinterpret_cast<uint64_t*>(bases[r]) + flags.rank, count);
  // Reading the host's memory takes longer than a round. A wait that is long reads it anyway.
  if (count % kRoundsOfALook == 0 && threadIdx.x == kThreads - 1 && static_cast<volatile Report*>(report)->ended)
    atomicExch(claim, 1ull);
  for (int r = threadIdx.x; r < flags.size; r += kThreads)
    if (r != flags.rank && !wait_for(own + r, count, r, place, claim, report)) break;
  __syncthreads();
  if (threadIdx.x == 0) {
    own[flags.count()] = count;
    own[flags.waited()] += nanoseconds() - begin;
    report->traffic.sent_bytes = static_cast<int64_t>(own[flags.sent()]);
    report->traffic.waited_ns = static_cast<int64_t>(own[flags.waited()]);
  }
}

}  // namespace

struct GpuRounds::Impl {
  RoundFlags flags;
  std::function<double()> timeout_s;
  std::shared_ptr<HostBuffer> report = std::make_shared<HostBuffer>(DeviceKind::cuda, sizeof(Report));
  GpuWaitWatchdog* watchdog = nullptr;
  GpuWaitWatchdog before;  // without this

  // A captured kernel reads the timeout when it waits, since the timeout may change between replays.
  void set_timeout() { reinterpret_cast<volatile Report*>(of_host())->timeout_ns = std::llround(timeout_s() * 1e9); }
  void end_kernels() { reinterpret_cast<volatile Report*>(of_host())->ended = 1; }

  Report* of_host() const { return static_cast<Report*>(report->data()); }
};

GpuRounds::GpuRounds(Stream& s, const RoundFlags& flags, std::function<double()> timeout_s, std::function<void()> look,
                     std::function<void()> ended)
    : impl_(std::make_unique<Impl>()) {
  new (impl_->of_host()) Report;
  impl_->flags = flags;
  impl_->timeout_s = std::move(timeout_s);
  impl_->set_timeout();
  impl_->watchdog = &s.accelerator().state<GpuWaitWatchdog>();
  impl_->before = *impl_->watchdog;
  const auto guarded = [impl = impl_.get()](const auto& body) {
    try {
      body();
    } catch (...) {
      impl->end_kernels();
      throw;
    }
  };
  impl_->watchdog->check = [impl = impl_.get(), guarded, look = std::move(look)](double waited_s) {
    guarded([&] {
      impl->set_timeout();
      look();
      if (impl->before.check) impl->before.check(waited_s);
    });
  };
  impl_->watchdog->ended = [impl = impl_.get(), guarded, ended = std::move(ended)] {
    guarded([&] {
      ended();
      if (impl->before.ended) impl->before.ended();
    });
  };
}

GpuRounds::~GpuRounds() {
  impl_->end_kernels();
  *impl_->watchdog = impl_->before;
}

void GpuRounds::launch(Stream& s, int place) {
  impl_->set_timeout();
  round_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(impl_->flags, place, impl_->of_host());
  check_launch("peer round");
}

std::shared_ptr<PeerTraffic> GpuRounds::traffic() const { return {impl_->report, &impl_->of_host()->traffic}; }

std::optional<RoundReport> GpuRounds::report() const {
  const volatile Report* report = impl_->of_host();
  if (report->state != Report::late) return std::nullopt;
  return RoundReport{.rank = report->rank, .place = report->place, .expected = report->expected, .seen = report->seen};
}

}  // namespace moebius
