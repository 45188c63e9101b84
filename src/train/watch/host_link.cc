#include "train/watch/host_link.h"

namespace moebius {
namespace {

constexpr double kSlowTimes = 2, kSlowShare = 0.05;

bool is_slow(double bytes, double seconds, double step_time_s) {
  const double planned = bytes / kPlannedLinkRate;
  return seconds >= kSlowTimes * planned && seconds - planned > kSlowShare * step_time_s;
}

std::string rate_text(double bytes_per_s) { return fmt::format("{:.1f} GB/s", bytes_per_s / 1e9); }

}  // namespace

int64_t bytes_read_from_host(const Engine& engine) {
  int64_t bytes = engine.plan().bytes(Life::host) - engine.plan().offloaded_bytes();
  if (!engine.spec().optimizer || !engine.spec().optimizer->offload_grad) return bytes;
  for (const Param& p : engine.model().params().all())
    if (p.sums_apart()) bytes += p.grad_sum.num_bytes();
  return bytes;
}

void HostLink::add_step(const std::vector<RankTimes>& times, double step_time_s) {
  rank_ = -1;
  bool slow = false;
  for (size_t r = 0; r < std::min(times.size(), bytes_.size()); ++r) {
    const double seconds = times[r].optimizer_s - times[r].waiting_s;
    if (bytes_[r] <= 0 || seconds <= 0) continue;
    slow = slow || is_slow(bytes_[r], seconds, step_time_s);
    if (is_known() && bytes_[r] / seconds >= rate_) continue;
    rank_ = static_cast<int>(r);
    rate_ = bytes_[r] / seconds;
  }
  slow_steps_ = slow ? slow_steps_ + 1 : 0;
}

std::string HostLink::text(const std::vector<std::string>& hosts) const {
  const auto r = static_cast<size_t>(rank_);
  const std::string host = r < hosts.size() && !hosts[r].empty() ? fmt::format(" ({})", hosts[r]) : "";
  return fmt::format("the update of rank {}{} moved {} over the link of its host at {} each way; plans assume {}",
                     rank_, host, bytes_text(static_cast<int64_t>(bytes_[r])), rate_text(rate_),
                     rate_text(kPlannedLinkRate));
}

}  // namespace moebius
