#include "comm/gpu/gpu_group.h"

#include "comm/group_checks.h"

namespace moebius {
namespace {

bool on_gpu(const Stream& s) { return s.device() == DeviceKind::cuda; }

}  // namespace

void GpuGroup::all_reduce_sum(Stream& s, Tensor x) {
  if (!on_gpu(s)) return over_->all_reduce_sum(s, x);
  check_sum(*this, "all_reduce_sum", x);
  check_on_device(*this, "all_reduce_sum", s, {x});
  gpu_all_reduce_sum(s, x);
}

void GpuGroup::reduce_scatter_sum(Stream& s, Tensor out, Tensor in) {
  if (!on_gpu(s)) return over_->reduce_scatter_sum(s, out, in);
  check_sum(*this, "reduce_scatter_sum", in);
  check_times_size(*this, "reduce_scatter_sum", "in", in, "out", out);
  check_on_device(*this, "reduce_scatter_sum", s, {out, in});
  gpu_reduce_scatter_sum(s, out, in);
}

void GpuGroup::all_gather(Stream& s, Tensor out, Tensor in) {
  if (!on_gpu(s)) return over_->all_gather(s, out, in);
  check_times_size(*this, "all_gather", "out", out, "in", in);
  check_on_device(*this, "all_gather", s, {out, in});
  gpu_all_gather(s, out, in);
}

void GpuGroup::all_to_all_v(Stream& s, const AllToAllV& a) {
  if (!on_gpu(s)) return over_->all_to_all_v(s, a);
  check_rows(*this, a);
  check_on_device(*this, "all_to_all_v", s, {a.out, a.in});
  gpu_all_to_all_v(s, a);
}

void GpuGroup::broadcast(Stream& s, Tensor x, int root) {
  if (!on_gpu(s)) return over_->broadcast(s, x, root);
  check_member(*this, "broadcast: root", root);
  check_on_device(*this, "broadcast", s, {x});
  gpu_broadcast(s, x, root);
}

Pending GpuGroup::send(Stream& s, Tensor x, int to) {
  if (!on_gpu(s)) return over_->send(s, x, to);
  check_send(*this, to);
  check_on_device(*this, "send", s, {x});
  return gpu_send(s, x, to);
}

Pending GpuGroup::recv(Stream& s, Tensor x, int from) {
  if (!on_gpu(s)) return over_->recv(s, x, from);
  check_recv(*this, from);
  check_on_device(*this, "recv", s, {x});
  return gpu_recv(s, x, from);
}

Pending GpuGroup::start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) {
  if (!on_gpu(s)) return over_->start_reduce_scatter_sum(s, out, in, arrived);
  check_sum(*this, "start_reduce_scatter_sum", in);
  check_times_size(*this, "start_reduce_scatter_sum", "in", in, "out", out);
  check_times_size(*this, "start_reduce_scatter_sum", "arrived", arrived, "out", out);
  check_on_device(*this, "start_reduce_scatter_sum", s, {out, arrived, in});
  return gpu_start_reduce_scatter_sum(s, out, in, arrived);
}

Pending GpuGroup::start_all_gather(Stream& s, Tensor out, Tensor in) {
  if (!on_gpu(s)) return over_->start_all_gather(s, out, in);
  check_times_size(*this, "start_all_gather", "out", out, "in", in);
  check_on_device(*this, "start_all_gather", s, {out, in});
  return gpu_start_all_gather(s, out, in);
}

Pending GpuGroup::gpu_start_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in, const Tensor&) {
  gpu_reduce_scatter_sum(s, out, in);
  return {};
}

Pending GpuGroup::gpu_start_all_gather(Stream& s, const Tensor& out, const Tensor& in) {
  gpu_all_gather(s, out, in);
  return {};
}

}  // namespace moebius
