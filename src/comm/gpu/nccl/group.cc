#include "comm/gpu/nccl/group.h"

#include <algorithm>

#include "comm/gpu/cuda/sum_of_ranks.h"
#include "comm/gpu/gpu_group.h"
#include "comm/gpu/nccl/world.h"
#include "comm/reduce_parts.h"

namespace moebius {
namespace {

// Returns the messages of a step, in which to[d] has as many spans as member d has for this rank. A rank begins with
// its neighbours, so that not all of them begin with rank 0.
NcclMessages messages_of(const LevelStep& step, const std::vector<Spans>& to, const std::vector<Spans>& from) {
  NcclMessages messages;
  for (int i = 1; i < step.radix(); ++i) {
    const int next = (step.digit + i) % step.radix(), previous = (step.digit + step.radix() - i) % step.radix();
    for (const Span& span : to[next]) messages.push_back({.span = span, .peer = step.members[next], .sends = true});
    for (const Span& span : from[previous]) messages.push_back({.span = span, .peer = step.members[previous]});
  }
  return messages;
}

std::vector<Spans> one_each(const Spans& spans) {
  std::vector<Spans> each;
  for (const Span& span : spans) each.push_back({span});
  return each;
}

void copy(cudaStream_t on, const Span& to, const Span& from) {
  if (to.data == from.data || from.num_bytes == 0) return;
  MOEBIUS_CUDA(cudaMemcpyAsync(to.data, from.data, from.num_bytes, cudaMemcpyDeviceToDevice, on));
}

int64_t bytes_for_others(const Spans& to, int rank) {
  int64_t bytes = 0;
  for (int r = 0; r < static_cast<int>(to.size()); ++r) bytes += r == rank ? 0 : to[r].num_bytes;
  return bytes;
}

class NcclGroup final : public GpuGroup {
 public:
  NcclGroup(NcclWorld& world, std::unique_ptr<Group> on_host, const NcclUse& use)
      : GpuGroup(std::move(on_host)),
        world_(world),
        levels_(size(), use.node),
        steps_(levels_.steps(rank())),
        lane_(alone_),
        overlapped_(alone_) {
    if (size() == 1) return;
    lane_ = world_.collective_lane(over(), NcclLaneKind::blocking);
    if (use.overlapped) overlapped_ = world_.collective_lane(over(), NcclLaneKind::overlapped);
    // NCCL's own sums might add in another order with fewer blocks.
    if (use.few_blocks && world_.sums() == GpuSums::ranks) {
      overlapped_ = world_.collective_lane(over(), NcclLaneKind::few_blocks);
      taken_ = NcclWorld::kFewBlocks;
    }
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
  void send_messages(cudaStream_t on, const NcclLane& lane, const NcclMessages& messages);
  // The exchanges and sums of collectives over levels.
  LevelCalls level_calls(cudaStream_t on, const NcclLane& lane);
  PartCalls part_calls(cudaStream_t on, const NcclLane& lane);
  Span arrived() const { return {static_cast<std::byte*>(world_.arrived()), NcclWorld::kArrivedBytes}; }
  // Counts the bytes of a pass of one of NCCL's own collectives over x, which has the parts of all ranks.
  void count_pass(const Tensor& x) { world_.count(counters_, x.num_bytes() / size() * (size() - 1)); }
  void gather(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in);
  // Runs body on a side stream, after all work that s has so far.
  template <class Body>
  Pending start(const NcclLane& lane, Body&& body);
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
  std::vector<LevelStep> steps_;  // of this rank
  NcclLane alone_, lane_, overlapped_;
  std::map<int, NcclLane> to_, from_;  // by neighbour
  std::shared_ptr<NcclCounters> counters_ = std::make_shared<NcclCounters>();
  int64_t num_calls_ = 0, setup_bytes_ = 0;
  int taken_ = 0;  // multiprocessors_of_start()
};

// An overlapped operation: the lane's stream runs concurrently with the caller's until wait().
class NcclGroup::Joining final : public Pending::Transfer {
 public:
  Joining(NcclGroup& group, cudaEvent_t done) : group_(group), done_(done) {}
  ~Joining() override { group_.world_.release_event(done_); }
  void wait() override {
    group_.timed([&] { MOEBIUS_CUDA(cudaStreamWaitEvent(group_.world_.stream(), done_)); });
  }
  void wait_on_host() override { group_.world_.wait_for(done_); }

 private:
  NcclGroup& group_;
  cudaEvent_t done_;
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

void NcclGroup::send_messages(cudaStream_t on, const NcclLane& lane, const NcclMessages& messages) {
  world_.exchange(on, lane, messages);
  int64_t bytes = 0;
  for (const NcclMessage& message : messages) bytes += message.sends ? message.span.num_bytes : 0;
  world_.count(counters_, bytes);
}

LevelCalls NcclGroup::level_calls(cudaStream_t on, const NcclLane& lane) {
  return {.exchange =
              [this, on, &lane](const LevelStep& step, const Spans& to, const Spans& from) {
                send_messages(on, lane, messages_of(step, one_each(to), one_each(from)));
                copy(on, from[step.digit], to[step.digit]);
              },
          .sum = [on](const Tensor& out, const RankParts& parts) { cuda::sum_of_ranks(on, out, parts); }};
}

PartCalls NcclGroup::part_calls(cudaStream_t on, const NcclLane& lane) {
  return {.levels = level_calls(on, lane),
          .exchange = [this, on, &lane](
                          const LevelStep& step, const std::vector<Spans>& to,
                          const std::vector<Spans>& from) { send_messages(on, lane, messages_of(step, to, from)); },
          .copy = [on](const Span& to, const Span& from) { copy(on, to, from); }};
}

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
    const LevelCalls calls = level_calls(cuda_stream(s), lane_);
    const int64_t n = x.numel(), fits = elements_that_fit(levels_, n, x.dtype, arrived().num_bytes);
    for (int64_t at = 0; at < n; at += fits * size()) {
      const Tensor piece_N = flat(x).rows(at, std::min(at + fits * size(), n));
      const LevelMemory memory = level_memory(levels_, piece_N.numel(), x.dtype, arrived().data);
      sum_over_levels(calls, steps_, slice_of(piece_N, levels_.place(rank()), size()), piece_N, memory);
      gather_over_levels(calls, steps_, piece_N);
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
  timed([&] { reduce_parts(part_calls(cuda_stream(s), lane_), levels_, rank(), out, in, arrived()); });
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
  timed([&] { broadcast_over_levels(level_calls(cuda_stream(s), lane_), levels_, rank(), root, x); });
}

// --- overlapped with other work -------------------------------------------------------------------------------------

template <class Body>
Pending NcclGroup::start(const NcclLane& lane, Body&& body) {
  world_.limit_launch_queue();
  world_.order(world_.stream(), lane.stream);
  body(lane.stream);
  const cudaEvent_t done = world_.take_event();
  auto joining = std::make_unique<Joining>(*this, done);
  MOEBIUS_CUDA(cudaEventRecord(done, lane.stream));
  return Pending(std::move(joining));
}

Pending NcclGroup::gpu_start_reduce_scatter_sum(Stream& s, const Tensor& out, const Tensor& in, const Tensor& arrived) {
  const bool of_nccl = world_.sums() == GpuSums::nccl && size() > 1;
  // The memory is too small for the f32 sums of a few bf16 elements over several levels.
  const int64_t fit =
      elements_that_fit(levels_, out.numel(), in.dtype, aligned_for(in.dtype, span_of(arrived)).num_bytes);
  const bool is_small = !of_nccl && fit == 0 && out.numel() > 0;
  if (!overlapped_.stream || is_small) return GpuGroup::gpu_start_reduce_scatter_sum(s, out, in, arrived);
  record("start_reduce_scatter_sum", in);
  return start(overlapped_, [&](cudaStream_t on) {
    if (of_nccl) {
      world_.nccl_reduce_scatter(on, overlapped_, out, in);
      return count_pass(in);
    }
    reduce_parts(part_calls(on, overlapped_), levels_, rank(), out, in, span_of(arrived));
  });
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

std::unique_ptr<Group> make_nccl_group(NcclWorld& world, std::unique_ptr<Group> over, const NcclUse& use) {
  return std::make_unique<NcclGroup>(world, std::move(over), use);
}

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
  return make_nccl_group(impl_->world, std::move(over), use);
}

void NcclLinks::abandon() { impl_->world.abandon(); }

}  // namespace moebius
