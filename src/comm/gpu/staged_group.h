// A StagedGroup exchanges GPU memory by messages.
// Each message is copied to pinned host memory, sent, and copied back to the GPU where it arrives.
// The host computes the sums.
// So several ranks may share one GPU, and the bits are those of the same run on CPUs.
// Every call waits for the stream, so no call can be captured in a CUDA graph.
//
// Sums, all_gather and broadcast go in pieces of Group::kSumPiece elements for each rank.
// all_to_all_v and messages between two ranks go in one piece.
// The group keeps the pinned memory. The start_* calls have ended when they return.
#pragma once

#include <vector>

#include "comm/group.h"

namespace moebius {

class StagedGroup final : public Group {
 public:
  // over: a group of the same ranks, for CPU memory.
  // It also handles the calls on streams that are not a GPU's.
  explicit StagedGroup(std::unique_ptr<Group> over) : over_(std::move(over)) {}

  const std::string& name() const override { return over_->name(); }
  const std::vector<int>& ranks() const override { return over_->ranks(); }
  int rank() const override { return over_->rank(); }
  void all_reduce_sum(Stream& s, Tensor x) override;
  void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) override;
  void all_gather(Stream& s, Tensor out, Tensor in) override;
  void all_to_all_v(Stream& s, const AllToAllV& a) override;
  void broadcast(Stream& s, Tensor x, int root) override;
  Pending send(Stream& s, Tensor x, int to) override;
  Pending recv(Stream& s, Tensor x, int from) override;
  Pending start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) override;
  Pending start_all_gather(Stream& s, Tensor out, Tensor in) override;
  void barrier() override { over_->barrier(); }
  int64_t sent_bytes() const override { return over_->sent_bytes(); }
  double seconds() const override { return over_->seconds() + copying_s_; }

 private:
  class Arrival;
  class Departure;

  Tensor room_for(const Tensor& x);  // pinned, of x's shape and dtype; until the next call
  void to_host(Stream& s, const Tensor& to, const Tensor& from);
  void to_gpu(Stream& s, const Tensor& to, const Tensor& from);
  HostBuffer take(int64_t num_bytes);

  std::unique_ptr<Group> over_;
  HostBuffer room_, second_room_;
  std::vector<HostBuffer> free_;  // buffers of messages that have ended
  double copying_s_ = 0;
};

}  // namespace moebius
