// A StagedGroup communicates GPU memory through host memory: each message is copied to pinned host memory, sent, and
// copied to the GPU of its receiver. The host computes the sums. So several ranks may share one GPU, and the bits are
// those of the same run on CPUs. Every call waits for the stream, so no call can be captured in a CUDA graph.
//
// Sums, all_gather and broadcast run in pieces of Group::kSumPiece elements for each rank; all_to_all_v and messages
// between two ranks in one piece. The group keeps the pinned memory. start_* calls complete before they return.
#pragma once

#include <vector>

#include "comm/gpu/gpu_group.h"

namespace moebius {

class StagedGroup final : public GpuGroup {
 public:
  // over: a group of the same ranks, for CPU memory.
  explicit StagedGroup(std::unique_ptr<Group> over) : GpuGroup(std::move(over)) {}

  int64_t sent_bytes() const override { return over().sent_bytes(); }
  double seconds() const override { return over().seconds() + copying_s_; }
  bool stages_gpu_memory() const override { return true; }

 private:
  class Arrival;
  class Departure;

  void gpu_all_reduce_sum(Stream& s, const Tensor& x) override;
  void gpu_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in) override;
  void gpu_all_gather(Stream& s, const Tensor& out, const Tensor& in) override;
  void gpu_all_to_all_v(Stream& s, const AllToAllV& a) override;
  void gpu_broadcast(Stream& s, const Tensor& x, int root) override;
  Pending gpu_send(Stream& s, const Tensor& x, int to) override;
  Pending gpu_recv(Stream& s, const Tensor& x, int from) override;

  Tensor staging_for(const Tensor& x);  // pinned memory of x's shape and dtype, valid until the next call
  void to_host(Stream& s, const Tensor& to, const Tensor& from);
  void to_gpu(Stream& s, const Tensor& to, const Tensor& from);
  HostBuffer take(int64_t num_bytes);

  HostBuffer staging_, second_staging_;
  std::vector<HostBuffer> free_;  // buffers of messages that have ended
  double copying_s_ = 0;
};

}  // namespace moebius
