// Groups that communicate GPU memory by NCCL. The transport carries only NCCL's bootstrap and the barriers; everything
// else is kernels on streams.
//
// With GpuSums::ranks a collective is an exchange of grouped sends and receives, and our own kernel adds in the order
// of Group. Sums and broadcasts have an exchange for each level (comm/level_collectives.h). So the bits and the bytes
// are those of the message groups. In groups of more than 8 ranks all_gather is NCCL's. With GpuSums::nccl the sums and
// all_gather are NCCL's, which chooses the order of its sums.
//
// Blocking calls run on the caller's stream. start_*, send and recv run on side streams, which events fork and join,
// inside and outside of CUDA graphs. The byte counters and times of a captured call grow with each replay
// (GraphCapture). No call waits on the host, except to limit how far the host runs ahead of the GPU.
#pragma once

#include <memory>
#include <string>

#include "comm/transport/transport.h"
#include "device/accelerator.h"

namespace moebius {

// The implementation of sums between GPUs: our kernel, which adds in rank order, or NCCL.
enum class GpuSums { ranks, nccl };

// The uses of a group besides blocking collectives. Each use needs GPU memory.
struct NcclUse {
  bool neighbours = false;  // send and recv between ranks that differ by one, or between the last and the first
  bool overlapped = false;  // start_*
  // start_* beside matrix products of the same layer: on a stream of its own, with few multiprocessors
  // (Group::multiprocessors_of_start). With GpuSums::nccl it has no effect.
  bool few_blocks = false;
  int node = 8;  // ranks of the group on a node, for comm/collective_levels.h
};

class NcclLinks {
 public:
  static std::string why_missing();  // the reason why NCCL cannot be used; empty if it can
  static std::string version();      // such as "2.28.9"; empty without NCCL

  // REQUIRES: gpu belongs to this rank alone. From now on a wait of the host for the GPU throws Error{distributed} in
  // three cases: NCCL reports an error, another rank is known to have failed, or the wait exceeds the world's timeout.
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
