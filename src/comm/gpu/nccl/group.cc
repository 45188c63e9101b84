#include <algorithm>

#include "comm/gpu/cuda/sum_of_ranks.h"
#include "comm/gpu/gpu_group.h"
#include "comm/gpu/nccl.h"
#include "comm/gpu/nccl/world.h"

namespace moebius {
namespace {

int64_t bytes_for_others(const Spans& to, int rank) {
  int64_t bytes = 0;
  for (int r = 0; r < static_cast<int>(to.size()); ++r) bytes += r == rank ? 0 : to[r].num_bytes;
  return bytes;
}

class NcclGroup final : public GpuGroup {
 public:
  NcclGroup(NcclWorld& world, std::unique_ptr<Group> on_host, const NcclUse& use)
      : GpuGroup(std::move(on_host)), world_(world), levels_(size(), use.node), lane_(alone_), overlapped_(alone_) {
    if (size() == 1) return;
    lane_ = world_.collective_lane(over(), NcclLaneKind::blocking);
    if (use.overlapped) overlapped_ = world_.collective_lane(over(), NcclLaneKind::overlapped);
    if (use.beside_products) overlapped_ = world_.collective_lane(over(), NcclLaneKind::beside_products);
    taken_ = use.beside_products ? NcclWorld::kBesideProducts : 0;
    if (use.neighbours) make_pairs();
    setup_bytes_ = over().sent_bytes();
  }

  int64_t sent_bytes() const override { return over().sent_bytes() - setup_bytes_ + counters_->sent_bytes; }
  double seconds() const override {
    world_.settle();
    return over().seconds() + counters_->seconds;
  }
  int multiprocessors_of_start() const override { return taken_; }

 private:
  class Joining;

  void gpu_all_reduce_sum(Stream& s, const Tensor& x) override;
  void gpu_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in) override;
  void gpu_all_gather(Stream& s, const Tensor& out, const Tensor& in) override;
  void gpu_all_to_all_v(Stream& s, const AllToAllV& a) override;
  void gpu_broadcast(Stream& s, const Tensor& x, int root) override;
  Pending gpu_send(Stream& s, const Tensor& x, int to) override;
  Pending gpu_recv(Stream& s, const Tensor& x, int from) override;
  Pending gpu_start_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in, const Tensor& arrived) override;
  Pending gpu_start_all_gather(Stream& s, const Tensor& out, const Tensor& in) override;

  void make_pairs();
  void record(const char* op, const Tensor& x);  // for the flight recorder
  void exchange(cudaStream_t on, const NcclLane& lane, const Spans& to, const Spans& from) {
    world_.exchange(on, lane, to, from);
    world_.count(counters_, bytes_for_others(to, lane.rank));
  }
  // Memory with space for stride_bytes from each rank.
  struct Arriving {
    void* data;
    int64_t stride_bytes;
  };
  // Returns the memory for the sums of blocking calls, in pieces.
  Arriving arriving() const { return {world_.arrived(), NcclWorld::kArrivedBytes / size() / 16 * 16}; }
  // Sends to[r] to rank r. The parts of the other ranks for this one arrive.
  void exchange_parts(cudaStream_t on, const NcclLane& lane, const Spans& to, const Arriving& parts);
  // Computes out = the sum over ranks of their parts, of which `own` was computed here.
  void sum_parts(cudaStream_t on, const Tensor& out, const Tensor& own, const Arriving& parts);
  // Does both.
  void sum_exchange(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& own, const Spans& to,
                    const Arriving& parts);
  // Counts the bytes of a pass of one of NCCL's own collectives over x, which has the parts of all ranks.
  void count_pass(const Tensor& x) { world_.count(counters_, x.num_bytes() / size() * (size() - 1)); }
  void gather(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in);
  // Runs body on a side stream, after all work that s has so far.
  // then: launched on the engine's stream by wait().
  template <class Body>
  Pending start(const NcclLane& lane, Body&& body, std::function<void()> then = {});
  Pending transfer(const char* op, const Tensor& x, int other, bool sends);
  template <class Body>
  void timed(Body&& body) {
    world_.limit_launch_queue();
    TimedInterval interval = world_.begin_interval(counters_);
    body();
    world_.end_interval(std::move(interval));
  }

  NcclWorld& world_;
  CollectiveLevels levels_;
  NcclLane alone_, lane_, overlapped_;
  std::map<int, NcclLane> to_, from_;  // by neighbour
  std::shared_ptr<NcclCounters> counters_ = std::make_shared<NcclCounters>();
  int64_t num_calls_ = 0, setup_bytes_ = 0;
  int taken_ = 0;  // multiprocessors_of_start()
};

// An overlapped operation: the lane's stream runs concurrently with the caller's until wait().
class NcclGroup::Joining final : public Pending::Transfer {
 public:
  Joining(NcclGroup& group, cudaEvent_t done, std::function<void()> then)
      : group_(group), done_(done), then_(std::move(then)) {}
  ~Joining() override { group_.world_.release_event(done_); }
  void wait() override {
    group_.timed([&] {
      MOEBIUS_CUDA(cudaStreamWaitEvent(group_.world_.stream(), done_));
      if (then_) then_();
    });
  }
  void wait_on_host() override { group_.world_.wait_for(done_); }

 private:
  NcclGroup& group_;
  cudaEvent_t done_;
  std::function<void()> then_;
};

// All ranks connect in the same order, so that they cannot deadlock: around the ring forward, then back.
void NcclGroup::make_pairs() {
  for (int r = 0; r < size(); ++r) {
    const int next = (r + 1) % size();
    if (size() == 2 && r == 1) break;
    for (const auto& [from, to] : {std::pair(r, next), std::pair(next, r)}) {
      if (rank() == from) to_[to] = world_.pair_lane(over(), from, to);
      if (rank() == to) from_[from] = world_.pair_lane(over(), from, to);
    }
  }
}

void NcclGroup::record(const char* op, const Tensor& x) {
  CollectiveFlightRecorder& recorder = world_.transport().recorder();
  recorder.end(
      recorder.begin({.op = op, .group = name(), .number = num_calls_++, .dtype = x.dtype, .numel = x.numel()}));
}

// --- collectives ----------------------------------------------------------------------------------------------------

void NcclGroup::exchange_parts(cudaStream_t on, const NcclLane& lane, const Spans& to, const Arriving& parts) {
  const int64_t own_bytes = to[rank()].num_bytes;  // slices of other ranks may be shorter or longer
  Spans from;
  for (int r = 0; r < size(); ++r)
    from.push_back({.data = static_cast<std::byte*>(parts.data) + r * parts.stride_bytes, .num_bytes = own_bytes});
  from[rank()] = to[rank()];
  exchange(on, lane, to, from);
}

void NcclGroup::sum_parts(cudaStream_t on, const Tensor& out, const Tensor& own, const Arriving& parts) {
  cuda::sum_of_ranks(on, out,
                     {.own = own.data, .arrived = parts.data, .stride_bytes = parts.stride_bytes, .own_rank = rank()},
                     levels_);
}

void NcclGroup::sum_exchange(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& own,
                             const Spans& to, const Arriving& parts) {
  exchange_parts(on, lane, to, parts);
  sum_parts(on, out, own, parts);
}

// Returns the number of elements whose shares from all ranks arrive at once.
int64_t piece_of(const Tensor& x, int size) { return NcclWorld::kArrivedBytes / size / size_of(x.dtype) / 16 * 16; }

void NcclGroup::gpu_all_reduce_sum(Stream& s, const Tensor& x) {
  record("all_reduce_sum", x);
  if (size() == 1) return;
  if (world_.sums() == GpuSums::nccl) {
    return timed([&] {
      world_.nccl_all_reduce(cuda_stream(s), lane_, x);
      count_pass(x);
      count_pass(x);
    });
  }
  timed([&] {
    const int64_t n = x.numel(), piece = piece_of(x, size()) * size();
    for (int64_t at = 0; at < n; at += piece) {
      const Tensor piece_N = flat(x).rows(at, std::min(at + piece, n));
      const Spans slices = slices_of(piece_N, size());
      const Tensor own = slice_of(piece_N, rank(), size());
      sum_exchange(cuda_stream(s), lane_, own, own, slices, arriving());
      exchange(cuda_stream(s), lane_, Spans(size(), span_of(own)), slices);
    }
  });
}

void NcclGroup::gpu_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in) {
  record("reduce_scatter_sum", in);
  if (world_.sums() == GpuSums::nccl && size() > 1) {
    return timed([&] {
      world_.nccl_reduce_scatter(cuda_stream(s), lane_, out, in);
      count_pass(in);
    });
  }
  timed([&] {
    const int64_t own = out.numel(), piece = piece_of(in, size());
    for (int64_t at = 0; at < own; at += piece) {
      const int64_t end = std::min(at + piece, own);
      const auto part = [&](int r) { return flat(in).rows(r * own + at, r * own + end); };
      Spans to;
      for (int r = 0; r < size(); ++r) to.push_back(span_of(part(r)));
      sum_exchange(cuda_stream(s), lane_, flat(out).rows(at, end), part(rank()), to, arriving());
    }
  });
}

void NcclGroup::gather(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in) {
  const bool large = size() > CollectiveLevels::kMaxRadix;
  if (size() == 1 || (world_.sums() == GpuSums::ranks && !large))
    return exchange(on, lane, Spans(size(), span_of(in)), blocks_of(out, size()));
  world_.nccl_all_gather(on, lane, out, in);
  count_pass(out);
}

void NcclGroup::gpu_all_gather(Stream& s, const Tensor& out, const Tensor& in) {
  record("all_gather", in);
  timed([&] { gather(cuda_stream(s), lane_, out, in); });
}

void NcclGroup::gpu_all_to_all_v(Stream& s, const AllToAllV& a) {
  record("all_to_all_v", a.in);
  timed([&] { exchange(cuda_stream(s), lane_, runs_of(a.in, a.send_rows), runs_of(a.out, a.recv_rows)); });
}

void NcclGroup::gpu_broadcast(Stream& s, const Tensor& x, int root) {
  record("broadcast", x);
  Spans to(size()), from(size());
  from[root] = span_of(x);
  if (rank() == root) to.assign(size(), span_of(x));
  timed([&] { exchange(cuda_stream(s), lane_, to, from); });
}

// --- overlapped with other work -------------------------------------------------------------------------------------

template <class Body>
Pending NcclGroup::start(const NcclLane& lane, Body&& body, std::function<void()> then) {
  world_.limit_launch_queue();
  world_.order(world_.stream(), lane.stream);
  body(lane.stream);
  const cudaEvent_t done = world_.take_event();
  auto joining = std::make_unique<Joining>(*this, done, std::move(then));
  MOEBIUS_CUDA(cudaEventRecord(done, lane.stream));
  return Pending(std::move(joining));
}

Pending NcclGroup::gpu_start_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in, const Tensor& arrived) {
  if (!overlapped_.stream) return GpuGroup::gpu_start_reduce_scatter_sum(s, out, in, arrived);
  record("start_reduce_scatter_sum", in);
  if (world_.sums() == GpuSums::nccl && size() > 1) {
    return start(overlapped_, [&](cudaStream_t on) {
      world_.nccl_reduce_scatter(on, overlapped_, out, in);
      count_pass(in);
    });
  }
  const Tensor own = in.rows(rank() * out.dim(0), (rank() + 1) * out.dim(0));
  const Arriving parts{arrived.data, out.num_bytes()};
  if (taken_ == 0) {
    return start(overlapped_,
                 [&](cudaStream_t on) { sum_exchange(on, overlapped_, out, own, blocks_of(in, size()), parts); });
  }
  // The sum would have to wait for the multiprocessors of the products beside the exchange, so it follows them.
  return start(
      overlapped_, [&](cudaStream_t on) { exchange_parts(on, overlapped_, blocks_of(in, size()), parts); },
      [this, out, own, parts] { sum_parts(world_.stream(), out, own, parts); });
}

Pending NcclGroup::gpu_start_all_gather(Stream& s, const Tensor& out, const Tensor& in) {
  if (!overlapped_.stream) return GpuGroup::gpu_start_all_gather(s, out, in);
  record("start_all_gather", in);
  return start(overlapped_, [&](cudaStream_t on) { gather(on, overlapped_, out, in); });
}

// --- between two ranks ----------------------------------------------------------------------------------------------

Pending NcclGroup::transfer(const char* op, const Tensor& x, int other, bool sends) {
  const auto& lanes = sends ? to_ : from_;
  const auto found = lanes.find(other);
  MOEBIUS_CHECK(
      usage, found != lanes.end(),
      "{} of group {}: over NCCL messages go between neighbours of a group that is made for them; got ranks {} "
      "and {} of {}",
      op, name(), rank(), other, size());
  record(op, x);
  const NcclLane& lane = found->second;
  return start(lane, [&](cudaStream_t on) {
    Spans to(2), from(2);
    (sends ? to : from)[1 - lane.rank] = span_of(x);
    exchange(on, lane, to, from);
  });
}

Pending NcclGroup::gpu_send(Stream&, const Tensor& x, int to) { return transfer("send", x, to, /*sends=*/true); }

Pending NcclGroup::gpu_recv(Stream&, const Tensor& x, int from) { return transfer("recv", x, from, /*sends=*/false); }

}  // namespace

// --- links ----------------------------------------------------------------------------------------------------------

struct NcclLinks::Impl {
  NcclWorld world;
};

std::string NcclLinks::why_missing() { return nccl_library().why_missing; }

std::string NcclLinks::version() {
  int v = 0;
  if (!why_missing().empty() || nccl_library().get_version(&v) != ncclSuccess) return "";
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

NcclLinks::NcclLinks(Transport& world, Accelerator& gpu, GpuSums sums) : impl_(new Impl{NcclWorld(world, gpu, sums)}) {}
NcclLinks::~NcclLinks() = default;

std::unique_ptr<Group> NcclLinks::make_group(std::unique_ptr<Group> over, const NcclUse& use) {
  return std::make_unique<NcclGroup>(impl_->world, std::move(over), use);
}

void NcclLinks::abandon() { impl_->world.abandon(); }

}  // namespace moebius
