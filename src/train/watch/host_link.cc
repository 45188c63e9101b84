#include "train/watch/host_link.h"

#include <algorithm>

namespace moebius {
namespace {

constexpr double kSlowTimes = 2, kSlowShare = 0.05;

std::string rate_text(double bytes_per_s) { return fmt::format("{:.1f} GB/s", bytes_per_s / 1e9); }

}  // namespace

int64_t bytes_read_from_host(const Engine& engine) {
  int64_t bytes = engine.plan().bytes(Life::host) - engine.plan().offloaded_bytes();
  if (!engine.spec().offload_weights) return bytes;
  for (const Param& p : engine.model().params().all())
    if (p.frozen && p.shards_weights()) bytes -= p.owned_weights().num_bytes();
  return bytes;
}

void HostLink::add_step(const StepTimes& times, double step_time_s) {
  const double states_s = times.states_s;
  if (bytes_ <= 0 || states_s <= 0) return;
  const double planned = bytes_ / kPcie5LinkRate;
  const double hidden = times.states_overlap ? (times.passes_s - states_s) / (2 * num_micro_batches_ - 1) : 0;
  const bool is_slow =
      states_s >= kSlowTimes * planned && states_s - std::max(planned, hidden) > kSlowShare * step_time_s;
  slow_steps_ = is_slow ? slow_steps_ + 1 : 0;
  rate_ = bytes_ / states_s;
  is_least_rate_ = times.states_overlap;
}

std::string HostLink::text() const {
  return fmt::format("the update moved {} over the link of the host at {} {}each way; plans for PCIe 5 assume {}",
                     bytes_text(static_cast<int64_t>(bytes_)), rate_text(rate_), is_least_rate_ ? "or more " : "",
                     rate_text(kPcie5LinkRate));
}

}  // namespace moebius
