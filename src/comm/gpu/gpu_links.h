// GpuLinks move GPU memory between the ranks of a world.
// They use NCCL where every rank has a GPU of its own.
// Otherwise they send messages through host memory (comm/gpu/staged_group.h), and ranks may share a
// GPU. CPU memory always travels by messages.
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
  // All ranks of the world make it together.
  // The references must outlive the links, and the links the groups.
  // Throws Error{usage} for GpuSums::nccl where NCCL cannot be used.
  GpuLinks(Transport& world, Accelerator& gpu, GpuRanks& ranks, GpuSums sums = GpuSums::ranks);

  // Makes a group, like Transport::make_group.
  std::unique_ptr<Group> make_group(std::string name, std::vector<int> world_ranks, const NcclUse& use);
  // Returns whether the work of the groups can be captured in a CUDA graph.
  // Messages through host memory cannot.
  bool can_capture() const { return nccl_ != nullptr; }
  // Returns "NCCL 2.28.9", or "messages through host memory, since ranks share a GPU".
  const std::string& text() const { return text_; }

  // Aborts what the GPU still waits for from other ranks. A rank that fails calls it.
  void abandon();

 private:
  Transport& world_;
  std::unique_ptr<NcclLinks> nccl_;
  std::string text_;
};

}  // namespace moebius
