// GpuLinks make the groups that communicate GPU memory. If every rank has a GPU of its own, they use NCCL. Otherwise
// messages are staged through host memory (comm/gpu/staged_group.h), and ranks may share a GPU. CPU memory is always
// sent by the transport.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/gpu/gpu_ranks.h"
#include "comm/gpu/nccl.h"
#include "device/accelerator.h"

namespace moebius {

class GpuLinks {
 public:
  // All ranks of the world construct it together. The references must outlive it, and it must outlive its groups.
  // Throws Error{usage} for GpuSums::nccl if NCCL cannot be used.
  GpuLinks(Transport& world, Accelerator& gpu, GpuRanks& ranks, GpuSums sums = GpuSums::ranks);

  // Makes a group, like Transport::make_group.
  std::unique_ptr<Group> make_group(std::string name, std::vector<int> world_ranks, const NcclUse& use);
  // Returns whether a CUDA graph can capture the work of the groups: with NCCL, but not with staged messages.
  bool can_capture() const { return nccl_ != nullptr; }
  // Returns "NCCL 2.28.9", or "messages through host memory, since ranks share a GPU".
  const std::string& text() const { return text_; }

  // Aborts the communication in flight, which the GPU may still wait for. A rank that fails calls it.
  void abandon();

 private:
  Transport& world_;
  std::unique_ptr<NcclLinks> nccl_;
  std::string text_;
};

}  // namespace moebius
