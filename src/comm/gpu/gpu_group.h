// GpuGroup is the base class of groups that communicate GPU memory. It wraps a group of the same ranks for CPU memory,
// which provides name, ranks and barrier, and handles calls on CPU streams. Calls on a GPU's stream are checked here,
// and implemented by the derived class.
#pragma once

#include <memory>

#include "comm/group.h"

namespace moebius {

class GpuGroup : public Group {
 public:
  const std::string& name() const final { return over_->name(); }
  const std::vector<int>& ranks() const final { return over_->ranks(); }
  int rank() const final { return over_->rank(); }
  void barrier() final { over_->barrier(); }
  void check() final { over_->check(); }
  double timeout_s() const final { return over_->timeout_s(); }
  std::string rank_name(int rank) const final { return over_->rank_name(rank); }
  void count_also(std::shared_ptr<const PeerTraffic> traffic) final { over_->count_also(std::move(traffic)); }

  void all_reduce_sum(Stream& s, Tensor x) final;
  void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) final;
  void all_gather(Stream& s, Tensor out, Tensor in) final;
  void all_to_all_v(Stream& s, const AllToAllV& a) final;
  void broadcast(Stream& s, Tensor x, int root) final;
  Pending send(Stream& s, Tensor x, int to) final;
  Pending recv(Stream& s, Tensor x, int from) final;
  Pending start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) final;
  Pending start_all_gather(Stream& s, Tensor out, Tensor in) final;

 protected:
  explicit GpuGroup(std::unique_ptr<Group> over) : over_(std::move(over)) {}
  Group& over() const { return *over_; }
  static Tensor flat(const Tensor& x) { return x.view({x.numel()}); }

  // The start_* calls on a GPU's stream, with checked arguments. By default they complete before they return.
  virtual Pending gpu_start_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in, const Tensor& arrived);
  virtual Pending gpu_start_all_gather(Stream& s, const Tensor& out, const Tensor& in);

 private:
  // The other calls on a GPU's stream, with checked arguments.
  virtual void gpu_all_reduce_sum(Stream& s, const Tensor& x) = 0;
  virtual void gpu_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in) = 0;
  virtual void gpu_all_gather(Stream& s, const Tensor& out, const Tensor& in) = 0;
  virtual void gpu_all_to_all_v(Stream& s, const AllToAllV& a) = 0;
  virtual void gpu_broadcast(Stream& s, const Tensor& x, int root) = 0;
  virtual Pending gpu_send(Stream& s, const Tensor& x, int to) = 0;
  virtual Pending gpu_recv(Stream& s, const Tensor& x, int from) = 0;

  std::unique_ptr<Group> over_;
};

}  // namespace moebius
