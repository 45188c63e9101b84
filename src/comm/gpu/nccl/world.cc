#include "comm/gpu/nccl/world.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "comm/liveness/bounded_call.h"
#include "device/gpu_wait_watchdog.h"

namespace moebius {
namespace {

bool has_happened(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) return false;
  check_cuda(status, "cudaEventQuery");
  return true;
}

void add_length(const TimedInterval& interval, int64_t times) {
  float ms = 0;
  MOEBIUS_CUDA(cudaEventElapsedTime(&ms, interval.begin, interval.end));
  interval.counters->seconds += 1e-3 * ms * static_cast<double>(times);
}

ncclResult_t make_comm_of(const NcclLibrary& nccl, ncclComm_t* comm, int size, const ncclUniqueId& id, int rank,
                          int max_blocks) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (max_blocks > 0) config.minCTAs = config.maxCTAs = max_blocks;
  return nccl.comm_init(comm, size, id, rank, &config);
}

void launch_messages(const NcclLibrary& nccl, cudaStream_t on, const NcclLane& lane, const NcclMessages& messages) {
  MOEBIUS_NCCL(nccl.group_start());
  for (const auto& [span, peer, sends] : messages) {
    if (span.num_bytes == 0) continue;
    if (sends)
      MOEBIUS_NCCL(nccl.send(span.data, span.num_bytes, ncclInt8, peer, lane.comm, on));
    else
      MOEBIUS_NCCL(nccl.recv(span.data, span.num_bytes, ncclInt8, peer, lane.comm, on));
  }
  MOEBIUS_NCCL(nccl.group_end());
}

void launch_exchange(const NcclLibrary& nccl, cudaStream_t on, const NcclLane& lane, const Spans& to,
                     const Spans& from) {
  NcclMessages messages;
  for (int i = 1; i < lane.size; ++i) {
    const int next = (lane.rank + i) % lane.size, previous = (lane.rank + lane.size - i) % lane.size;
    messages.push_back({.span = to[next], .peer = next, .sends = true});
    messages.push_back({.span = from[previous], .peer = previous});
  }
  launch_messages(nccl, on, lane, messages);
  const Span &own = to[lane.rank], &place = from[lane.rank];
  if (own.data != place.data && own.num_bytes > 0)
    MOEBIUS_CUDA(cudaMemcpyAsync(place.data, own.data, own.num_bytes, cudaMemcpyDeviceToDevice, on));
}

// Returns NCCL's type for a sum; the checks of a group refuse all other types.
ncclDataType_t nccl_type(DType dtype) {
  if (dtype == DType::f32) return ncclFloat32;
  if (dtype == DType::f64) return ncclFloat64;
  if (dtype == DType::i64) return ncclInt64;
  return ncclBfloat16;
}

// Returns world ranks. members: ranks of `over`.
std::vector<int> others_of(const Group& over, const std::vector<int>& members) {
  std::vector<int> others;
  for (int member : members)
    if (member != over.rank()) others.push_back(over.ranks()[member]);
  return others;
}

}  // namespace

NcclCapture::~NcclCapture() {
  for (const TimedInterval& interval : intervals) {
    cudaEventDestroy(interval.begin);
    cudaEventDestroy(interval.end);
  }
}

NcclWorld::NcclWorld(Transport& world, Accelerator& gpu, GpuSums sums, const NcclLibrary& nccl)
    : transport_(world), gpu_(gpu), sums_(sums), nccl_(nccl), arrived_(DeviceKind::cuda, kArrivedBytes) {
  for (cudaEvent_t& pace : paces_) MOEBIUS_CUDA(cudaEventCreateWithFlags(&pace, cudaEventDisableTiming));
  gpu_.state<GpuWaitWatchdog>().check = [this](double waited_s) { check_wait(waited_s); };
}

NcclWorld::~NcclWorld() {
  gpu_.state<GpuWaitWatchdog>().check = nullptr;
  if (std::uncaught_exceptions() > 0) abandon();
  if (!abandoned_) destroy_comms();
  if (!is_through()) return;
  for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  for (cudaEvent_t event : free_events_) cudaEventDestroy(event);
  for (cudaEvent_t event : free_timing_events_) cudaEventDestroy(event);
  for (const TimedInterval& interval : intervals_) {
    cudaEventDestroy(interval.begin);
    cudaEventDestroy(interval.end);
  }
  for (cudaEvent_t pace : paces_) cudaEventDestroy(pace);
}

// Destroys the communicators at the regular end of a run. Other ranks may have failed meanwhile.
void NcclWorld::destroy_comms() noexcept {
  try {
    call_with_ranks("ending the communicators of NCCL", {}, [comms = comms_, &nccl = nccl_] {
      for (ncclComm_t comm : comms) nccl.comm_destroy(comm);
    });
  } catch (const std::exception&) {
    abandoned_ = true;  // a call that hangs stays on its thread
  }
}

// --- lanes ----------------------------------------------------------------------------------------------------------

// NCCL itself would wait without limit for a rank that ended while a communicator was being made.
void NcclWorld::call_with_ranks(const std::string& what, const std::vector<int>& with,
                                const std::function<void()>& call) {
  int device = 0;
  MOEBIUS_CUDA(cudaGetDevice(&device));
  aborts_open_->fetch_add(1);  // so streams and events stay alive while the call runs
  const std::shared_ptr<void> open(nullptr, [counter = aborts_open_](void*) { counter->fetch_sub(1); });
  const auto body = [device, call, open] {
    MOEBIUS_CUDA(cudaSetDevice(device));
    call();
  };
  call_bounded(transport_, {.what = what, .with = with, .body = body});
}

// members: ranks of `over`, in the order of their ranks in the communicator.
// The first sends NCCL's id to the others by messages of the world, so that a missing rank
// is noticed there.
ncclComm_t NcclWorld::make_comm(Group& over, const std::vector<int>& members, int max_blocks) {
  ThreadPool pool(1);
  Stream host(DeviceKind::cpu, pool);
  ncclUniqueId id{};
  uint8_t bytes[sizeof id];
  const Tensor text = tensor_of(bytes, {int64_t{sizeof id}});
  if (over.rank() == members[0]) {
    MOEBIUS_NCCL(nccl_.get_unique_id(&id));
    std::memcpy(bytes, &id, sizeof id);
    for (size_t i = 1; i < members.size(); ++i) over.send(host, text, members[i]).wait();
  } else {
    over.recv(host, text, members[0]).wait();
    std::memcpy(&id, bytes, sizeof id);
  }
  const auto found = std::find(members.begin(), members.end(), over.rank());
  const auto rank = static_cast<int>(found - members.begin()), size = static_cast<int>(members.size());
  const auto comm = std::make_shared<ncclComm_t>(nullptr);
  call_with_ranks(fmt::format("making a communicator of NCCL for group {}", over.name()), others_of(over, members),
                  [comm, id, rank, size, max_blocks, &nccl = nccl_] {
                    MOEBIUS_NCCL(make_comm_of(nccl, comm.get(), size, id, rank, max_blocks));
                  });
  comms_.push_back(*comm);
  return *comm;
}

cudaStream_t NcclWorld::side_stream(NcclLaneKind kind) {
  if (kind == NcclLaneKind::blocking) return nullptr;
  cudaStream_t& stream = side_streams_[kind];
  if (!stream) {
    // Products that may start at the same time would fill the GPU first.
    int lowest = 0, highest = 0;
    MOEBIUS_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    const int priority = kind == NcclLaneKind::few_blocks ? highest : 0;
    MOEBIUS_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
    streams_.push_back(stream);
  }
  return stream;
}

NcclLane& NcclWorld::collective_lane(Group& over, NcclLaneKind kind) {
  NcclLane& lane = lanes_[{over.ranks(), static_cast<int>(kind)}];
  if (lane.comm) return lane;
  std::vector<int> all;
  for (int r = 0; r < over.size(); ++r) all.push_back(r);
  const int max_blocks = kind == NcclLaneKind::few_blocks ? kFewBlocks : 0;
  lane = {
      .comm = make_comm(over, all, max_blocks), .rank = over.rank(), .size = over.size(), .stream = side_stream(kind)};
  const Span word{static_cast<std::byte*>(arrived_.data()), 4};
  connect(over, all, lane, {Spans(lane.size, word), Spans(lane.size, {word.data + 16, 4})});
  return lane;
}

NcclLane& NcclWorld::pair_lane(Group& over, int from, int to) {
  // Each group has its own lane, so that messages of one group never wait for those of another.
  NcclLane& lane = lanes_[{{from, to}, static_cast<int>(NcclLaneKind::one_way) + num_pairs_++}];
  lane = {.comm = make_comm(over, {from, to}), .rank = over.rank() == from ? 0 : 1, .size = 2};
  MOEBIUS_CUDA(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
  streams_.push_back(lane.stream);
  const Span word{static_cast<std::byte*>(arrived_.data()), 4}, none{word.data, 0};
  Spans spans(2, none);
  spans[1 - lane.rank] = word;
  connect(over, {from, to}, lane, {lane.rank == 0 ? spans : Spans(2, none), lane.rank == 1 ? spans : Spans(2, none)});
  return lane;
}

// The first exchange allocates memory. This must happen before the plan is compared with
// the free memory.
void NcclWorld::connect(Group& over, const std::vector<int>& members, const NcclLane& lane,
                        const std::pair<Spans, Spans>& to_and_from) {
  try {
    call_with_ranks(fmt::format("connecting the ranks of group {} by NCCL", over.name()), others_of(over, members),
                    [on = stream(), lane, to_and_from, &nccl = nccl_] {
                      launch_exchange(nccl, on, lane, to_and_from.first, to_and_from.second);
                    });
  } catch (...) {
    abandon();  // ends the thread that hangs there
    throw;
  }
  synchronize_stream();
}

void NcclWorld::synchronize_stream() { cuda::synchronize(gpu_); }

// --- work -----------------------------------------------------------------------------------------------------------

void NcclWorld::exchange(cudaStream_t on, const NcclLane& lane, const Spans& to, const Spans& from) {
  check_not_abandoned();
  launch_exchange(nccl_, on, lane, to, from);
}

void NcclWorld::exchange(cudaStream_t on, const NcclLane& lane, const NcclMessages& messages) {
  check_not_abandoned();
  launch_messages(nccl_, on, lane, messages);
}

void NcclWorld::nccl_all_reduce(cudaStream_t on, const NcclLane& lane, const Tensor& x) {
  check_not_abandoned();
  const size_t count = static_cast<size_t>(x.numel());
  MOEBIUS_NCCL(nccl_.all_reduce(x.data, x.data, count, nccl_type(x.dtype), ncclSum, lane.comm, on));
}

void NcclWorld::nccl_reduce_scatter(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in) {
  check_not_abandoned();
  const size_t count = static_cast<size_t>(out.numel());
  MOEBIUS_NCCL(nccl_.reduce_scatter(in.data, out.data, count, nccl_type(in.dtype), ncclSum, lane.comm, on));
}

void NcclWorld::nccl_all_gather(cudaStream_t on, const NcclLane& lane, const Tensor& out, const Tensor& in) {
  check_not_abandoned();
  const size_t bytes = static_cast<size_t>(in.num_bytes());
  MOEBIUS_NCCL(nccl_.all_gather(in.data, out.data, bytes, ncclInt8, lane.comm, on));
}

void NcclWorld::order(cudaStream_t before, cudaStream_t after) {
  if (before == after) return;
  const cudaEvent_t event = take_event();
  MOEBIUS_CUDA(cudaEventRecord(event, before));
  MOEBIUS_CUDA(cudaStreamWaitEvent(after, event));
  release_event(event);  // recording it again does not change launched work
}

cudaEvent_t NcclWorld::take_event() {
  cudaEvent_t event = nullptr;
  if (free_events_.empty()) {
    MOEBIUS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } else {
    event = free_events_.back();
    free_events_.pop_back();
  }
  return event;
}

cudaEvent_t NcclWorld::take_timing_event() {
  cudaEvent_t event = nullptr;
  if (free_timing_events_.empty() || is_capturing()) {
    MOEBIUS_CUDA(cudaEventCreate(&event));
  } else {
    event = free_timing_events_.back();
    free_timing_events_.pop_back();
  }
  // In a CUDA graph the event is a separate node, which each replay records again.
  MOEBIUS_CUDA(
      cudaEventRecordWithFlags(event, stream(), is_capturing() ? cudaEventRecordExternal : cudaEventRecordDefault));
  return event;
}

// --- counters -------------------------------------------------------------------------------------------------------

void NcclWorld::count(const std::shared_ptr<NcclCounters>& counters, int64_t sent_bytes) {
  if (is_capturing())
    capture().sent.emplace_back(counters, sent_bytes);
  else
    counters->sent_bytes += sent_bytes;
}

TimedInterval NcclWorld::begin_interval(std::shared_ptr<NcclCounters> counters) {
  constexpr size_t kMaxUnread = 4096;  // a limit in case nothing reads the times
  if (intervals_.size() > kMaxUnread) settle();
  return {.counters = std::move(counters), .begin = take_timing_event()};
}

void NcclWorld::end_interval(TimedInterval interval) {
  interval.end = take_timing_event();
  (is_capturing() ? capture().intervals : intervals_).push_back(std::move(interval));
}

void NcclWorld::settle() {
  if (is_capturing()) return;
  const auto is_over = [&](const TimedInterval& interval) {
    if (!has_happened(interval.end)) return false;
    add_length(interval, 1);
    free_timing_events_.insert(free_timing_events_.end(), {interval.begin, interval.end});
    return true;
  };
  std::erase_if(intervals_, is_over);
  std::erase_if(captures_, [](const auto& capture) { return capture.expired(); });
  for (const auto& weak : captures_) {
    const std::shared_ptr<NcclCapture> capture = weak.lock();
    const auto is_known = [](const TimedInterval& interval) { return has_happened(interval.end); };
    if (capture->num_unread == 0 || !std::ranges::all_of(capture->intervals, is_known)) continue;
    for (const TimedInterval& interval : capture->intervals) add_length(interval, capture->num_unread);
    capture->num_unread = 0;
  }
}

NcclCapture& NcclWorld::capture() {
  GraphCapture& graph = *gpu_.capture();
  std::shared_ptr<void>& mine = graph.state_of(this);
  if (!mine) {
    const auto made = std::make_shared<NcclCapture>();
    graph.after_replay([made] { made->replayed(); });
    captures_.push_back(made);
    mine = made;
  }
  return *static_cast<NcclCapture*>(mine.get());
}

void NcclCapture::replayed() {
  for (const auto& [group, bytes] : sent) group->sent_bytes += bytes;
  ++num_unread;
}

// --- failure --------------------------------------------------------------------------------------------------------

void NcclWorld::limit_launch_queue() {
  if (is_capturing() || ++num_operations_ % kOperationsOfPace != 0) return;
  const int64_t round = num_operations_ / kOperationsOfPace;
  cudaEvent_t& pace = paces_[round % kPaces];
  if (round > kPaces) wait_for(pace);
  MOEBIUS_CUDA(cudaEventRecord(pace, stream()));
}

void NcclWorld::wait_for(cudaEvent_t event) {
  const double begin = now_us();
  while (!has_happened(event)) {
    check_wait((now_us() - begin) * 1e-6);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// The messages of a step detect a host that is stopped.
// This detects a GPU that hangs, or a host that stopped during its launches.
void NcclWorld::check_wait(double waited_s) {
  check_not_abandoned();
  try {
    transport_.check();
    for (ncclComm_t comm : comms_) {
      ncclResult_t status = ncclSuccess;
      MOEBIUS_NCCL(nccl_.async_error(comm, &status));
      if (status != ncclSuccess && status != ncclInProgress) check_nccl(status, "a collective of NCCL");
    }
    const WorldOptions& options = transport_.options();
    const std::string name = name_of_rank(options, transport_.rank());
    MOEBIUS_CHECK(distributed, waited_s <= transport_.timeout_s(),
                  "{}: the GPU of {} has waited for {} s for other ranks\nlast collectives that {} launched:\n{}",
                  to_string(transport_.recorder().last()), name, transport_.timeout_s(), name,
                  transport_.recorder().text());
  } catch (...) {
    abandon();
    throw;
  }
}

// After abandon() the communicators are gone, or are ending.
void NcclWorld::check_not_abandoned() const {
  MOEBIUS_CHECK(distributed, !abandoned_, "{}: its work over NCCL was aborted after an earlier error",
                name_of_rank(transport_.options(), transport_.rank()));
}

// ncclCommAbort ends running work at once. It returns when the graphs with its work are gone and
// other ranks of this process have released it. So it runs on a thread of its own, and no call here
// waits for it.
void NcclWorld::abandon() {
  if (abandoned_) return;
  abandoned_ = true;
  int device = 0;
  cudaGetDevice(&device);
  for (ncclComm_t comm : comms_) {
    aborts_open_->fetch_add(1);
    std::thread([device, comm, open = aborts_open_, &nccl = nccl_] {
      cudaSetDevice(device);
      nccl.comm_abort(comm);
      open->fetch_sub(1);
    }).detach();
  }
}

// Streams and events stay alive until the communicators are gone, or forever if one
// cannot be ended.
bool NcclWorld::is_through() const {
  constexpr int kMaxMs = 3000;
  for (int ms = 0; *aborts_open_ > 0 && ms < kMaxMs; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return *aborts_open_ == 0;
}

}  // namespace moebius
