// NcclWorld holds what the NCCL groups of one rank share: communicators, streams in addition
// to the engine's own, events, and the memory in which sums arrive.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/gpu/nccl.h"
#include "comm/gpu/nccl/library.h"
#include "comm/level_collectives.h"
#include "device/cuda/cuda.h"

namespace moebius {

// A communicator and the stream of its kernels.
struct NcclLane {
  ncclComm_t comm = nullptr;
  int rank = 0, size = 1;         // this process's rank in it, and its size
  cudaStream_t stream = nullptr;  // null: the caller's stream
};

// A message of an exchange, to or from another rank of a communicator.
struct NcclMessage {
  Span span;
  int peer = 0;
  bool sends = false;
};
// The messages of a rank. Those between two ranks are matched in order.
using NcclMessages = std::vector<NcclMessage>;

// The counters of one group.
struct NcclCounters {
  int64_t sent_bytes = 0;
  double seconds = 0;
};

// A part of the engine's stream that is communication, or a wait for it. It ends when
// `end` has happened.
struct TimedInterval {
  std::shared_ptr<NcclCounters> counters;
  cudaEvent_t begin = nullptr, end = nullptr;
};

// The traffic of a CUDA graph, which each replay adds to the counters.
struct NcclCapture {
  std::vector<std::pair<std::shared_ptr<NcclCounters>, int64_t>> sent;
  std::vector<TimedInterval> intervals;  // those of the last replay, once it has ended
  int64_t num_unread = 0;                // replays whose intervals were not added yet
  NcclCapture() = default;
  NcclCapture(const NcclCapture&) = delete;
  ~NcclCapture();
  void replayed();
};

// The uses of a communicator. Each use of the same ranks has its own.
enum class NcclLaneKind : int {
  blocking,    // on the caller's stream
  overlapped,  // on a side stream, which all groups share
  few_blocks,  // on another such stream, with few blocks
  one_way,     // this and larger values: from one rank to another, a value for each such lane
};

class NcclWorld {
 public:
  // The number of blocks of NCCL's kernels that run beside matrix products, which leave them this many multiprocessors.
  static constexpr int kFewBlocks = 16;

  // nccl must outlive the process's threads: calls that hang are abandoned on one.
  NcclWorld(Transport& world, Accelerator& gpu, GpuSums sums, const NcclLibrary& nccl = nccl_library());
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;

  // Returns a lane for collectives. Groups of the same ranks share it. The ranks of `over` call it together.
  NcclLane& collective_lane(Group& over, NcclLaneKind kind);
  // Returns a lane from one rank of `over` to another. Both ranks call it together.
  NcclLane& pair_lane(Group& over, int from, int to);

  // Launches on `on`: to[r] is sent to rank r, and rank r fills from[r]. This rank's own
  // part is copied.
  void exchange(cudaStream_t on, const NcclLane& lane, const Spans& to, const Spans& from);
  // Launches these messages at once. Messages without bytes are left out.
  void exchange(cudaStream_t on, const NcclLane& lane, const NcclMessages& messages);
  // Makes later work of `after` wait for all work that `before` has so far.
  void order(cudaStream_t before, cudaStream_t after);
  cudaEvent_t take_event();
  void release_event(cudaEvent_t event) { free_events_.push_back(event); }

  void count(const std::shared_ptr<NcclCounters>& counters, int64_t sent_bytes);
  // These two measure the time of the engine's stream between them.
  TimedInterval begin_interval(std::shared_ptr<NcclCounters> counters);
  void end_interval(TimedInterval interval);
  void settle();  // adds the times of the intervals that have ended

  // Called by each operation. It limits how far the host launches ahead of the GPU: a full launch
  // queue would block the host for as long as another rank is stopped.
  void limit_launch_queue();
  void wait_for(cudaEvent_t event);  // on the host; REQUIRES: no graph is being captured
  void abandon();

  // Launch NCCL's own collectives. They work in place where the smaller tensor is this rank's part of the larger one.
  void nccl_all_reduce(cudaStream_t on, const NcclLane& lane, const Tensor& x);
  void nccl_reduce_scatter(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in);
  void nccl_all_gather(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in);

  GpuSums sums() const { return sums_; }
  Transport& transport() { return transport_; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(gpu_.native_stream()); }
  void* arrived() const { return arrived_.data(); }
  // The bytes of the buffer for the sums of blocking calls: for what arrives, and for sums
  // between levels. A larger sum is computed in pieces.
  static constexpr int64_t kArrivedBytes = int64_t{64} << 20;

 private:
  // max_blocks: the number of blocks of a collective's kernel; 0: NCCL's own choice.
  ncclComm_t make_comm(Group& over, const std::vector<int>& members, int max_blocks = 0);
  cudaStream_t side_stream(NcclLaneKind kind);
  // Makes the first exchange of a lane, which waits on the host until the other ranks join.
  void connect(Group& over, const std::vector<int>& members, const NcclLane& lane,
               const std::pair<Spans, Spans>& to_and_from);
  // Runs a call of NCCL that waits for the ranks `with` of the world, for at most the world's
  // timeout. The call must own the data that it uses, since it is abandoned after that.
  void call_with_ranks(const std::string& what, const std::vector<int>& with, const std::function<void()>& call);
  void destroy_comms() noexcept;
  void check_not_abandoned() const;
  bool is_through() const;
  void synchronize_stream();
  void check_wait(double waited_s);
  bool is_capturing() const { return gpu_.capture() != nullptr; }
  NcclCapture& capture();  // the capture of the current graph, made at first use; REQUIRES is_capturing()
  cudaEvent_t take_timing_event();

  Transport& transport_;
  Accelerator& gpu_;
  GpuSums sums_;
  const NcclLibrary& nccl_;
  Buffer arrived_;
  std::map<std::pair<std::vector<int>, int>, NcclLane> lanes_;  // indexed by world ranks and kind
  int num_pairs_ = 0;
  std::map<NcclLaneKind, cudaStream_t> side_streams_;
  std::vector<ncclComm_t> comms_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> free_events_, free_timing_events_;
  std::vector<TimedInterval> intervals_;  // not yet added
  std::vector<std::weak_ptr<NcclCapture>> captures_;
  // limit_launch_queue() records an event at every kOperationsOfPace-th operation. First it waits for the event that
  // was recorded kPaces events before.
  static constexpr int kPaces = 4, kOperationsOfPace = 8;
  cudaEvent_t paces_[kPaces] = {};
  int64_t num_operations_ = 0;
  bool abandoned_ = false;
  std::shared_ptr<std::atomic<int>> aborts_open_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace moebius
