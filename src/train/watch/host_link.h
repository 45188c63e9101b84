// The rate at which updates move masters and moments over the link between a GPU and its host (optimizer.offload),
// compared with the rate that plans assume. A host that is slower than planned makes steps longer, and no other figure
// shows it. It is for runs of one rank.
#pragma once

#include <string>

#include "engine/engine.h"

namespace moebius {

// The bytes per second, each way at once, that `moebius plan` assumes of a GPU on PCIe 5: link_gb_s of
// machines/h100.toml and h200.toml.
inline constexpr double kPcie5LinkRate = 45e9;

// Returns the bytes of host memory that an update of a run of one rank reads: masters and moments (optimizer.offload),
// sums of gradients (optimizer.offload_grad), and weights that are trained (in memory.offload). It does not write more.
int64_t bytes_read_from_host(const Engine& engine);

class HostLink {
 public:
  HostLink() = default;  // no states are on a host
  // bytes: bytes_read_from_host(). num_micro_batches: of a step.
  HostLink(double bytes, int64_t num_micro_batches)
      : bytes_(bytes), num_micro_batches_(static_cast<double>(num_micro_batches)) {}

  // Adds a step. times: of its parts; states_s is 0 if no update ran. step_time_s: seconds of the whole step.
  void add_step(const StepTimes& times, double step_time_s);

  // The rate is that of the last step. If the update overlapped with passes, its time includes waits for them, and the
  // link is at least as fast as the rate.
  bool is_known() const { return rate_ > 0; }
  double bytes_per_s() const { return rate_; }
  // Returns whether each of the last kSlowSteps steps had at most half of kPcie5LinkRate, and lost more than 5 % of its
  // time by that. It becomes true only once, after the last of these steps.
  // An update that overlaps with passes ends with the first of M forward passes. Without waits for the host, a forward
  // pass takes at most as long as a backward pass, and so at most (passes_s - states_s) / (2 M - 1). Such a step lost
  // what the update took beyond that.
  bool became_slow() const { return slow_steps_ == kSlowSteps; }
  static constexpr int64_t kSlowSteps = 10;
  // Returns a string such as "the update moved 28.9 GiB over the link of the host at 12.1 GB/s each way; plans for PCIe
  // 5 assume 45.0 GB/s".
  std::string text() const;

 private:
  double bytes_ = 0, num_micro_batches_ = 1, rate_ = 0;
  bool is_least_rate_ = false;
  int64_t slow_steps_ = 0;  // slow steps without a break
};

}  // namespace moebius
