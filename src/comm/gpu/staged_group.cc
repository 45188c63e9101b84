#include "comm/gpu/staged_group.h"

#include <algorithm>

namespace moebius {
namespace {

Stream on_host(const Stream& s) { return Stream(DeviceKind::cpu, s.pool()); }

Tensor in_host_memory(const Tensor& like, const HostBuffer& staging) {
  Tensor x = like;
  x.data = staging.data();
  x.device = DeviceKind::cpu;
  return x;
}

}  // namespace

// --- copies ---------------------------------------------------------------------------------------------------------

// The wait for work that the stream still computes does not count as communication.
void StagedGroup::to_host(Stream& s, const Tensor& to, const Tensor& from) {
  synchronize(s);
  const double begin = now_us();
  copy_to_host(s, to.data, from.data, from.num_bytes());
  copying_s_ += (now_us() - begin) * 1e-6;
}

void StagedGroup::to_gpu(Stream& s, const Tensor& to, const Tensor& from) {
  const double begin = now_us();
  copy_to_device(s, to.data, from.data, to.num_bytes());
  synchronize(s);
  copying_s_ += (now_us() - begin) * 1e-6;
}

Tensor StagedGroup::staging_for(const Tensor& x) {
  if (staging_.num_bytes() < x.num_bytes()) staging_ = HostBuffer(DeviceKind::cuda, x.num_bytes());
  return in_host_memory(x, staging_);
}

HostBuffer StagedGroup::take(int64_t num_bytes) {
  const auto found =
      std::find_if(free_.begin(), free_.end(), [&](const HostBuffer& b) { return b.num_bytes() >= num_bytes; });
  if (found == free_.end()) return HostBuffer(DeviceKind::cuda, num_bytes);
  HostBuffer buffer = std::move(*found);
  free_.erase(found);
  return buffer;
}

// --- collectives ----------------------------------------------------------------------------------------------------

void StagedGroup::gpu_all_reduce_sum(Stream& s, const Tensor& x) {
  Stream host = on_host(s);
  const int64_t n = x.numel(), piece = kSumPiece * size();
  for (int64_t at = 0; at < n && size() > 1; at += piece) {
    const Tensor piece_N = flat(x).rows(at, std::min(at + piece, n)), here_N = staging_for(piece_N);
    to_host(s, here_N, piece_N);
    over().all_reduce_sum(host, here_N);
    to_gpu(s, piece_N, here_N);
  }
}

void StagedGroup::gpu_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in) {
  Stream host = on_host(s);
  const int64_t own = out.numel();
  const Tensor in_N = flat(in), out_N = flat(out);
  for (int64_t at = 0; at < own; at += kSumPiece) {
    const int64_t count = std::min(kSumPiece, own - at);
    Tensor like = in;
    like.shape = {size() * count};
    const Tensor here_N = staging_for(like);
    for (int r = 0; r < size(); ++r)
      to_host(s, here_N.rows(r * count, (r + 1) * count), in_N.rows(r * own + at, r * own + at + count));
    const Tensor sum_N = here_N.rows(rank() * count, (rank() + 1) * count);
    over().reduce_scatter_sum(host, sum_N, here_N);
    to_gpu(s, out_N.rows(at, at + count), sum_N);
  }
}

void StagedGroup::gpu_all_gather(Stream& s, const Tensor& out, const Tensor& in) {
  Stream host = on_host(s);
  const int64_t own = in.numel();
  const Tensor in_N = flat(in), out_N = flat(out);
  for (int64_t at = 0; at < own; at += kSumPiece) {
    const int64_t count = std::min(kSumPiece, own - at);
    Tensor like = in;
    like.shape = {size() * count};
    const Tensor here_N = staging_for(like);
    const Tensor mine_N = here_N.rows(rank() * count, (rank() + 1) * count);
    to_host(s, mine_N, in_N.rows(at, at + count));
    over().all_gather(host, here_N, mine_N);
    for (int r = 0; r < size(); ++r)
      to_gpu(s, out_N.rows(r * own + at, r * own + at + count), here_N.rows(r * count, (r + 1) * count));
  }
}

void StagedGroup::gpu_all_to_all_v(Stream& s, const AllToAllV& a) {
  int64_t sent = 0, received = 0;
  for (int r = 0; r < size(); ++r) sent += a.send_rows[r], received += a.recv_rows[r];
  const Tensor in = a.in.rows(0, sent), out = a.out.rows(0, received), in_here = staging_for(in);
  if (second_staging_.num_bytes() < out.num_bytes()) second_staging_ = HostBuffer(DeviceKind::cuda, out.num_bytes());
  const Tensor out_here = in_host_memory(out, second_staging_);
  to_host(s, in_here, in);
  Stream host = on_host(s);
  over().all_to_all_v(host, {.out = out_here, .in = in_here, .recv_rows = a.recv_rows, .send_rows = a.send_rows});
  to_gpu(s, out, out_here);
}

void StagedGroup::gpu_broadcast(Stream& s, const Tensor& x, int root) {
  Stream host = on_host(s);
  for (int64_t at = 0; at < x.numel(); at += kSumPiece) {
    const Tensor piece_N = flat(x).rows(at, std::min(at + kSumPiece, x.numel())), here_N = staging_for(piece_N);
    if (rank() == root) to_host(s, here_N, piece_N);
    over().broadcast(host, here_N, root);
    if (rank() != root) to_gpu(s, piece_N, here_N);
  }
}

// --- between two ranks ----------------------------------------------------------------------------------------------

// The message is withdrawn before its memory is freed, since members are destroyed
// in reverse order.
class StagedGroup::Departure final : public Pending::Transfer {
 public:
  Departure(StagedGroup& group, HostBuffer staging) : group_(group), staging_(std::move(staging)) {}
  void begin(Pending message) { message_ = std::move(message); }
  void wait() override {
    message_.wait();
    group_.free_.push_back(std::move(staging_));
  }

 private:
  StagedGroup& group_;
  HostBuffer staging_;
  Pending message_;
};

class StagedGroup::Arrival final : public Pending::Transfer {
 public:
  Arrival(StagedGroup& group, Stream s, const Tensor& x, HostBuffer staging)
      : group_(group), s_(s), x_(x), staging_(std::move(staging)) {}
  void begin(Pending message) { message_ = std::move(message); }
  void wait() override {
    message_.wait();
    group_.to_gpu(s_, x_, in_host_memory(x_, staging_));
    group_.free_.push_back(std::move(staging_));
  }

 private:
  StagedGroup& group_;
  Stream s_;
  Tensor x_;
  HostBuffer staging_;
  Pending message_;
};

Pending StagedGroup::gpu_send(Stream& s, const Tensor& x, int to) {
  HostBuffer staging = take(x.num_bytes());
  const Tensor here = in_host_memory(x, staging);
  to_host(s, here, x);
  auto departure = std::make_unique<Departure>(*this, std::move(staging));
  Stream host = on_host(s);
  departure->begin(over().send(host, here, to));
  return Pending(std::move(departure));
}

Pending StagedGroup::gpu_recv(Stream& s, const Tensor& x, int from) {
  HostBuffer staging = take(x.num_bytes());
  const Tensor here = in_host_memory(x, staging);
  auto arrival = std::make_unique<Arrival>(*this, s, x, std::move(staging));
  Stream host = on_host(s);
  arrival->begin(over().recv(host, here, from));
  return Pending(std::move(arrival));
}

}  // namespace moebius
