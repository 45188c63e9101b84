// GpuLinks move memory of GPUs between the ranks of a world.
// They use NCCL where every rank has a GPU of its own.
// Otherwise they send messages through host memory (comm/gpu/staged_group.h), and ranks may share a GPU.
// Memory of the CPU always goes by messages.
#pragma once

#include <functional>
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
  GpuLinks(Transport& world, Accelerator& gpu, GpuRanks& ranks);

  // As Transport::make_group.
  std::unique_ptr<Group> make_group(std::string name, std::vector<int> world_ranks, const NcclUse& use);
  // Whether what the groups do may be recorded (device/accelerator.h).
  bool records() const { return nccl_ != nullptr; }
  // "NCCL 2.28.9", "messages through host memory, since ranks share a GPU"
  const std::string& text() const { return text_; }

  // Around CudaGraph's constructor, which may throw; and behind each replay, so that groups count what it sent.
  NcclTraffic record(const std::function<void()>& body) { return nccl_->record(body); }
  void replayed(const NcclTraffic& traffic) { nccl_->replayed(traffic); }
  // An exception passes by: what the GPU still waits for from other ranks is given up.
  void abandon();

 private:
  Transport& world_;
  std::unique_ptr<NcclLinks> nccl_;
  std::string text_;
};

}  // namespace moebius
