// A PeerWindow is memory of each rank of a group that all ranks of the group write to, one-sided: the
// owner does not take part. All windows have the same size and layout.
//
//   Rounds    Writes are ordered by rounds. A round is a barrier of the group over flags in the windows. What a rank
//             wrote before a round, to its own window or another's, is seen by every rank after the round.
//             Between two rounds no byte may be written by one rank and read or written by another.
//   Flags     Each rank counts its rounds. In a round it stores the count in the windows of all others (release)
//             and waits until all others have stored theirs in its own (acquire). Nothing else is exchanged.
//   Devices   On the CPU a round returns when all ranks have come. On a GPU it is a kernel of one block, part of
//             a CUDA graph where one is captured: work that is launched later runs when all ranks have come.
//             Where ranks share a GPU, of this group or of the world, rounds that are not captured meet on the host
//             instead, after the stream's work: a kernel that waits may keep the GPU from the work that it waits for.
//   Errors    Error{distributed} when another rank failed, or has not come within the group's timeout: it names the
//             rank that is waited for, phase, layer, and the rounds expected and seen. On a GPU the next wait of the
//             host throws it; the kernels that would wait for that rank end meanwhile.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "comm/gpu/peer_round.h"
#include "comm/group.h"
#include "comm/peer_pages.h"

namespace moebius {

// For messages: "dispatch", "model.layers.3.mlp".
struct RoundPlace {
  const char* phase = "";
  std::string layer;
  bool operator==(const RoundPlace&) const = default;
};

class PeerWindow {
 public:
  // Bytes at the begin of a window that are not the caller's.
  static int64_t control_bytes(int num_ranks);

  // All ranks of the group make it together. Each passes a window of its memory: zeroed u8,
  // at a multiple of 256 bytes.
  // REQUIRES: window is part of memory, and s is a stream of its device. The group must outlive this.
  // Error{usage}, the same on every rank, when a rank cannot reach the memory of another: it names both and says why.
  PeerWindow(Stream& s, Group& group, const PeerMemory& memory, const Tensor& window);
  ~PeerWindow();
  PeerWindow(const PeerWindow&) = delete;

  // i64 on the device: where each rank's window begins, as this rank sees it.
  Tensor bases_W() const;
  // i64 on the device: whoever writes to the windows of others adds the bytes. The group counts them after the next
  // round, and the time of the rounds.
  Tensor sent_1() const;
  // See above. Calls on one stream, by all ranks of the group in the same order.
  void round(Stream& s, const RoundPlace& place);

 private:
  Tensor words(int64_t first, int64_t count) const;  // of the window
  void round_on_host(const RoundPlace& place);
  void round_on_gpu(Stream& s, const RoundPlace& place);
  void wait_for(int rank, uint64_t round, const RoundPlace& place);
  void check_others(int rank, uint64_t round, const RoundPlace& place);
  [[noreturn]] void fail(int rank, uint64_t expected, uint64_t seen, const RoundPlace& place) const;
  // On a GPU: these throw what its rounds reported, and look() also that another rank has failed.
  void look();
  void throw_late();

  Group& group_;
  RoundFlags flags_;
  Tensor window_;
  PeerPages pages_;
  std::deque<RoundPlace> places_;  // those of launched rounds, which a report names by their index
  std::unique_ptr<GpuRounds> gpu_;
  std::shared_ptr<PeerTraffic> traffic_;
};

}  // namespace moebius
