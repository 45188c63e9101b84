// The rate at which updates move masters and moments over the link between a GPU and its host (optimizer.offload),
// beside the rate that plans assume. A host that is slower than planned makes steps longer, and is in no other figure.
#pragma once

#include <string>
#include <vector>

#include "train/rank_report.h"

namespace moebius {

// The bytes per second, each way at once, that `moebius plan` assumes of a GPU on PCIe 5: link_gb_s of
// machines/h100.toml.
inline constexpr double kPlannedLinkRate = 45e9;

// Returns the bytes of host memory that an update of this rank reads: masters and moments (optimizer.offload), and sums
// of gradients (optimizer.offload_grad), which the norm reads too. It writes at most as many.
int64_t bytes_read_from_host(const Engine& engine);

class HostLink {
 public:
  HostLink() = default;  // no rank has states on a host
  // bytes: bytes_read_from_host() of each rank, by world rank.
  explicit HostLink(std::vector<double> bytes) : bytes_(std::move(bytes)) {}

  // Takes the times of a step, by world rank. An update also sums gradients over ranks and computes the norm, so a rate
  // is a bound from below; time in communication calls does not count.
  void add_step(const std::vector<RankTimes>& times, double step_time_s);

  // The rate is that of the last step, on the rank where it was lowest.
  bool is_known() const { return rank_ >= 0; }
  double bytes_per_s() const { return rate_; }
  // Returns whether kSlowSteps steps in a row had a rank of at most half the planned rate, which took more than 5 % of
  // the step beyond the planned time. It is true after the last of these steps, and not again.
  bool became_slow() const { return slow_steps_ == kSlowSteps; }
  static constexpr int64_t kSlowSteps = 10;
  // Returns a text such as "the update of rank 3 (a) moved 28.9 GiB over the link of its host at 12.1 GB/s each way;
  // plans assume 45.0 GB/s". hosts: the machine of each rank.
  std::string text(const std::vector<std::string>& hosts) const;

 private:
  std::vector<double> bytes_;
  int rank_ = -1;
  double rate_ = 0;
  int64_t slow_steps_ = 0;  // without a break
};

}  // namespace moebius
