// Rounds of a PeerWindow on a GPU (comm/peer_window.h): the kernel, and what it reports to the host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "comm/group.h"
#include "device/device.h"

namespace moebius {

// The first wait that took too long.
struct RoundReport {
  int rank = 0;   // the rank of the group that did not join
  int place = 0;  // the index that was passed to launch()
  uint64_t expected = 0, seen = 0;
};

// The place of a round's flags. The windows of all ranks have the same layout.
struct RoundFlags {
  int rank = 0, size = 1;
  void* window = nullptr;  // this rank's window
  // 64-bit words of a window: flag[size], then these, then base[size], the addresses of all windows.
  constexpr int64_t count() const { return size; }       // number of the rank's rounds
  constexpr int64_t late() const { return size + 1; }    // 1: a round was late, or the host has ended rounds
  constexpr int64_t sent() const { return size + 2; }    // bytes that this rank wrote to the windows of others
  constexpr int64_t waited() const { return size + 3; }  // nanoseconds in rounds
  constexpr int64_t bases() const { return size + 4; }
};

class GpuRounds {
 public:
  // timeout_s: called at each launch and while the host waits for its GPU; waiting kernels use the last value.
  // look: called during these waits; ended: called after them. If they throw, waiting kernels end.
  GpuRounds(Stream& s, const RoundFlags& flags, std::function<double()> timeout_s, std::function<void()> look,
            std::function<void()> ended);
  ~GpuRounds();
  GpuRounds(const GpuRounds&) = delete;

  void launch(Stream& s, int place);  // place: the index by which a report names this round
  // Returns the counters that each round writes, in pinned memory.
  std::shared_ptr<PeerTraffic> traffic() const;
  // Returns the report of the first wait that took too long, if there was one.
  std::optional<RoundReport> report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moebius
