// Groups whose ranks exchange GPU memory by NCCL. Messages of the world carry what NCCL needs to
// start, and the barriers; everything else is kernels on streams.
//
// With GpuSums::ranks every collective is one exchange by grouped sends and receives. Our own kernel
// computes the sums in the order of Group, so that the bits are those of messages; a rank sends no
// more bytes than in a ring. In groups of more than 8 ranks all_gather is NCCL's.
// With GpuSums::nccl the sums and all_gather are NCCL's, which chooses the order of its sums.
// A blocking call runs on the caller's stream. start_*, send and recv run on streams beside it,
// forked and joined by events, both inside and outside of a CUDA graph. The byte counters and times
// of a captured call grow after each replay (GraphCapture).
// No call waits on the host, except to limit what is launched ahead of the GPU.
#pragma once

#include <memory>
#include <string>

#include "comm/transport/transport.h"
#include "device/accelerator.h"

namespace moebius {

// The adder of sums, which decides their order: our kernel, or NCCL.
enum class GpuSums { ranks, nccl };

// The uses of a group other than collectives. Each use needs GPU memory.
struct NcclUse {
  bool neighbours = false;  // send and recv between ranks that differ by one, or between the last and the first
  bool overlapped = false;  // start_*
  int node = 8;             // the group's ranks on a node, for comm/collective_levels.h
};

class NcclLinks {
 public:
  static std::string why_missing();  // what keeps NCCL from being used; empty when nothing does
  static std::string version();      // "2.28.9"; empty without NCCL

  // `gpu` must belong to this rank alone.
  // From here on a wait for the GPU ends with Error{distributed} when NCCL reports an error,
  // another rank is known to have failed, or the wait takes longer than the world's timeout.
  NcclLinks(Transport& world, Accelerator& gpu, GpuSums sums);
  ~NcclLinks();
  NcclLinks(const NcclLinks&) = delete;

  // over: a group of the same ranks, for CPU memory. The ranks of the group call it together.
  std::unique_ptr<Group> make_group(std::unique_ptr<Group> over, const NcclUse& use);

  void abandon();  // aborts the work in flight; after this nothing can be sent

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moebius
