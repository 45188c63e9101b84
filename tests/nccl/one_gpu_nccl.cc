#include "tests/nccl/one_gpu_nccl.h"

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/gpu/nccl/library.h"
#include "core/error.h"
#include "device/cuda/cuda.h"

namespace moebius {
namespace {

cudaEvent_t event_on(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  MOEBIUS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  MOEBIUS_CUDA(cudaEventRecord(event, stream));
  return event;
}

// Makes the stream wait for the event, which ends with that.
void wait_and_destroy(cudaStream_t stream, cudaEvent_t event) {
  MOEBIUS_CUDA(cudaStreamWaitEvent(stream, event));
  MOEBIUS_CUDA(cudaEventDestroy(event));
}

// A message on its way. The receiver copies it after `ready`; the sender's stream waits for `copied`.
struct Letter {
  const void* data = nullptr;
  size_t num_bytes = 0;
  cudaEvent_t ready = nullptr, copied = nullptr;
};

// The place where the ranks of a communicator meet.
class Hub {
 public:
  explicit Hub(int size) : size_(size) {}

  std::shared_ptr<Letter> post(int from, int to, Letter letter) {
    const std::scoped_lock lock(mutex_);
    auto& letters = letters_[{from, to}];
    letters.push_back(std::make_shared<Letter>(letter));
    changed_.notify_all();
    return letters.back();
  }
  std::shared_ptr<Letter> take(int from, int to) {
    std::unique_lock lock(mutex_);
    auto& letters = letters_[{from, to}];
    wait(lock, [&] { return !letters.empty(); });
    auto letter = letters.front();
    letters.pop_front();
    return letter;
  }
  void set_copied(Letter& letter, cudaEvent_t copied) {
    const std::scoped_lock lock(mutex_);
    letter.copied = copied;
    changed_.notify_all();
  }
  cudaEvent_t wait_for_copy(const Letter& letter) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return letter.copied != nullptr; });
    return letter.copied;
  }
  void abort() {
    const std::scoped_lock lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  // Returns whether all ranks of the communicator have called it.
  bool leave() {
    const std::scoped_lock lock(mutex_);
    return ++left_ == size_;
  }

 private:
  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, const Condition& condition) {
    const bool met = changed_.wait_for(lock, std::chrono::seconds(60), [&] { return aborted_ || condition(); });
    MOEBIUS_CHECK(distributed, met && !aborted_, "a call of NCCL's double: another rank did not join");
  }

  int size_, left_ = 0;
  bool aborted_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Letter>>> letters_;
};

// The id of a communicator holds the address of this, in which the first rank to join makes the hub.
struct Meeting {
  std::mutex mutex;
  Hub* hub = nullptr;
};

struct Comm {
  Hub* hub;
  Meeting* meeting;
  int rank, size;
};
Comm& comm_of(ncclComm_t comm) { return *reinterpret_cast<Comm*>(comm); }

struct Call {
  Comm* comm;
  bool sends;
  void* data;
  size_t num_bytes;
  int peer;
  cudaStream_t stream;
};

// The calls of a thread between group_start and group_end.
struct Calls {
  int depth = 0;
  std::vector<Call> calls;
  int64_t num_sent = 0;
};
Calls& calls_of_thread() {
  static thread_local Calls calls;
  return calls;
}

// All sends are posted before a receive waits, and all receives are copied before a send waits.
void run(const std::vector<Call>& calls) {
  std::vector<std::pair<Call, std::shared_ptr<Letter>>> sent;
  for (const Call& call : calls) {
    if (!call.sends) continue;
    const Letter letter{.data = call.data, .num_bytes = call.num_bytes, .ready = event_on(call.stream)};
    sent.emplace_back(call, call.comm->hub->post(call.comm->rank, call.peer, letter));
  }
  calls_of_thread().num_sent += std::ssize(sent);
  for (const Call& call : calls) {
    if (call.sends) continue;
    const auto letter = call.comm->hub->take(call.peer, call.comm->rank);
    MOEBIUS_CHECK(distributed, letter->num_bytes == call.num_bytes, "rank {} expected {} bytes from rank {}; got {}",
                  call.comm->rank, call.num_bytes, call.peer, letter->num_bytes);
    wait_and_destroy(call.stream, letter->ready);
    MOEBIUS_CUDA(cudaMemcpyAsync(call.data, letter->data, call.num_bytes, cudaMemcpyDeviceToDevice, call.stream));
    call.comm->hub->set_copied(*letter, event_on(call.stream));
  }
  for (const auto& [call, letter] : sent) wait_and_destroy(call.stream, call.comm->hub->wait_for_copy(*letter));
}

ncclResult_t add(const Call& call) {
  Calls& mine = calls_of_thread();
  mine.calls.push_back(call);
  if (mine.depth == 0) run(std::exchange(mine.calls, {}));
  return ncclSuccess;
}

// --- NCCL's functions -----------------------------------------------------------------------------------------------

ncclResult_t get_version(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  auto* const meeting = new Meeting;
  std::memcpy(id->internal, &meeting, sizeof meeting);
  return ncclSuccess;
}

ncclResult_t comm_init(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  Meeting* meeting = nullptr;
  std::memcpy(&meeting, id.internal, sizeof meeting);
  const std::scoped_lock lock(meeting->mutex);
  if (meeting->hub == nullptr) meeting->hub = new Hub(size);
  *comm = reinterpret_cast<ncclComm_t>(new Comm{meeting->hub, meeting, rank, size});
  return ncclSuccess;
}

ncclResult_t comm_destroy(ncclComm_t comm) {
  Comm* const mine = &comm_of(comm);
  if (mine->hub->leave()) {
    delete mine->hub;
    delete mine->meeting;
  }
  delete mine;
  return ncclSuccess;
}

ncclResult_t comm_abort(ncclComm_t comm) {
  comm_of(comm).hub->abort();
  return ncclSuccess;
}

ncclResult_t async_error(ncclComm_t, ncclResult_t* status) {
  *status = ncclSuccess;
  return ncclSuccess;
}

const char* error_string(ncclResult_t) { return "an error of NCCL's double"; }
const char* last_error(ncclComm_t) { return ""; }

ncclResult_t group_start() {
  ++calls_of_thread().depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  Calls& mine = calls_of_thread();
  if (--mine.depth == 0) run(std::exchange(mine.calls, {}));
  return ncclSuccess;
}

ncclResult_t send(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  MOEBIUS_ASSERT(type == ncclInt8);
  return add({&comm_of(comm), true, const_cast<void*>(data), count, peer, stream});
}

ncclResult_t recv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  MOEBIUS_ASSERT(type == ncclInt8);
  return add({&comm_of(comm), false, data, count, peer, stream});
}

ncclResult_t all_gather(const void* in, void* out, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  const Comm& mine = comm_of(comm);
  const auto at = [&](int r) { return static_cast<char*>(out) + r * count; };
  group_start();
  for (int r = 0; r < mine.size; ++r) {
    if (r == mine.rank || count == 0) continue;
    send(in, count, ncclInt8, r, comm, stream);
    recv(at(r), count, ncclInt8, r, comm, stream);
  }
  group_end();
  if (in != at(mine.rank)) MOEBIUS_CUDA(cudaMemcpyAsync(at(mine.rank), in, count, cudaMemcpyDeviceToDevice, stream));
  return ncclSuccess;
}

}  // namespace

const NcclLibrary& one_gpu_nccl() {
  static const NcclLibrary library{.get_version = get_version,
                                   .get_unique_id = get_unique_id,
                                   .comm_init = comm_init,
                                   .comm_destroy = comm_destroy,
                                   .comm_abort = comm_abort,
                                   .async_error = async_error,
                                   .error_string = error_string,
                                   .last_error = last_error,
                                   .group_start = group_start,
                                   .group_end = group_end,
                                   .send = send,
                                   .recv = recv,
                                   .all_gather = all_gather};
  return library;
}

int64_t messages_of_thread() { return calls_of_thread().num_sent; }

}  // namespace moebius
