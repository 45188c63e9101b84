// One-sided communication: each rank of a group has a window, memory that all ranks of the group can write to without
// the owner's help. All windows have the same size and layout.
//
//   Rounds    A round is a barrier of the group over flags in the windows, and orders the writes. What a rank wrote
//             before a round, to any window, is visible to every rank after the round. Between two rounds no byte may
//             be written by one rank and read or written by another.
//   Flags     Each rank counts its rounds. In a round it stores its count in the windows of all others (release), and
//             waits until all others have stored theirs in its own window (acquire). Nothing else is exchanged.
//   Devices   On the CPU a round returns when all ranks have arrived. On a GPU it is a kernel of one block, which a
//             CUDA graph may capture; work launched later runs when all ranks have arrived. If ranks of the group
//             share a GPU, or waits_on_host says that others share theirs, a waiting kernel could block the work that
//             it waits for. Then rounds that are not captured synchronise on the host, after the stream's work.
//   Errors    If another rank failed, or did not arrive within the group's timeout, a round throws
//             Error{distributed}. The message names that rank, the phase, the layer, and the rounds expected and
//             seen. On a GPU the host's next wait throws it, and waiting kernels end.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "comm/gpu/peer_round.h"
#include "comm/group.h"
#include "comm/peer_pages.h"

namespace moebius {

// The place of a round, for error messages, such as {"dispatch", "model.layers.3.mlp"}.
struct RoundPlace {
  const char* phase = "";
  std::string layer;
  bool operator==(const RoundPlace&) const = default;
};

class PeerWindow {
 public:
  // Returns the bytes at the beginning of a window that are reserved for flags.
  static int64_t control_bytes(int num_ranks);

  // All ranks of the group construct it together. window: zeroed u8, part of memory, at a multiple of 256 bytes. s: a
  // stream of its device. The group must outlive this.
  // waits_on_host: ranks outside of the group share GPUs with those of the group.
  // Throws Error{usage} on every rank when a rank cannot access the memory of another; it names both, with the reason.
  PeerWindow(Stream& s, Group& group, const PeerMemory& memory, const Tensor& window, bool waits_on_host = false);
  ~PeerWindow();
  PeerWindow(const PeerWindow&) = delete;

  // i64 on the device: the addresses of the windows of all ranks, in this process.
  Tensor bases_W() const;
  const std::vector<std::byte*>& windows() const { return pages_.windows; }  // the same addresses on the host
  // i64 on the device: code that writes to other ranks' windows adds the bytes here. The group's counters get them, and
  // the time of rounds, after the next round.
  Tensor sent_1() const;
  // Runs a round. All ranks of the group call it in the same order, on one stream.
  void round(Stream& s, const RoundPlace& place);

 private:
  Tensor words(int64_t first, int64_t count) const;  // words of the window
  void round_on_host(const RoundPlace& place);
  void round_on_gpu(Stream& s, const RoundPlace& place);
  void wait_for(int rank, uint64_t round, const RoundPlace& place);
  void check_others(int rank, uint64_t round, const RoundPlace& place);
  [[noreturn]] void fail(int rank, uint64_t expected, uint64_t seen, const RoundPlace& place) const;
  // On a GPU: these throw what its rounds reported, and check_peers() also that another rank has failed.
  void check_peers();
  void throw_reported();

  Group& group_;
  RoundFlags flags_;
  Tensor window_;
  bool waits_on_host_;
  PeerPages pages_;
  std::deque<RoundPlace> places_;  // those of launched rounds, which a report names by their index
  std::unique_ptr<GpuRounds> gpu_;
  std::shared_ptr<PeerTraffic> traffic_;
};

}  // namespace moebius
