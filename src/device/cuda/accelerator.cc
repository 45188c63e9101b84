#include "device/accelerator.h"

#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda/cuda.h"
#include "device/cuda/pinning.h"
#include "device/cuda/portable_probe.h"
#include "device/gpu_wait_watchdog.h"
#include "device/gpus_found.h"
#include "device/out_of_memory.h"
#include "device/pinned_memory.h"
#include "device/side_stream.h"

namespace moebius {
namespace {

cudaDeviceProp properties_of(int index) {
  cudaDeviceProp p;
  MOEBIUS_CUDA(cudaGetDeviceProperties(&p, index));
  return p;
}

// Returns "GPU-" and the bytes of the UUID in groups, as nvidia-smi prints it.
std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i)
    text += fmt::format("{}{:02x}", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                        static_cast<unsigned char>(uuid.bytes[i]));
  return text;
}

// Makes another GPU the thread's current one during a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    MOEBIUS_CUDA(cudaGetDevice(&before_));
    MOEBIUS_CUDA(cudaSetDevice(index));
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

struct Timed {
  Trace* trace;
  std::string name;
  std::optional<Cost> cost;  // set for an op, not set for a phase
  cudaEvent_t begin = nullptr, end = nullptr;
};

}  // namespace

GpusFound gpus_found() {
  GpusFound found{.built_with = CUDART_VERSION,
                  .lowest_capability = MOEBIUS_LOWEST_CAPABILITY,
                  .native = {MOEBIUS_NATIVE_CAPABILITIES}};
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) cudaGetLastError();
  int n = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&n); status != cudaSuccess) {
    cudaGetLastError();
    found.error = cudaGetErrorString(status);
    return found;
  }
  for (int i = 0; i < n; ++i) {
    const cudaDeviceProp p = properties_of(i);
    found.visible.push_back({.name = p.name,
                             .uuid = uuid_text(p.uuid),
                             .capability_major = p.major,
                             .capability_minor = p.minor,
                             .shared_bytes_per_block = static_cast<int64_t>(p.sharedMemPerBlockOptin)});
  }
  return found;
}

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  if (status == cudaErrorMemoryAllocation) {
    throw OutOfMemory(
        fmt::format("out of device memory in {}: the library's own memory did not fit next to the plan; stop other "
                    "programs on this GPU, or compute with smaller shapes",
                    call));
  }
  MOEBIUS_FAIL(internal, "CUDA: {}: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status));
}

struct Accelerator::Impl {
  int index = 0;
  cudaStream_t stream = nullptr;
  cudaStream_t side_stream = nullptr;  // the second stream, made at first use
  cudaEvent_t forked = nullptr, joined = nullptr;
  std::vector<cudaEvent_t> free_events;
  std::vector<cudaEvent_t> open_ops;
  std::vector<Timed> timed;      // scopes that ended on the host, whose times are not read yet
  cudaEvent_t origin = nullptr;  // the trace's time zero, on the device
  double origin_us = 0;          // and on the host

  cudaEvent_t take_event() {
    cudaEvent_t event;
    if (free_events.empty()) {
      MOEBIUS_CUDA(cudaEventCreate(&event));
    } else {
      event = free_events.back();
      free_events.pop_back();
    }
    MOEBIUS_CUDA(cudaEventRecord(event, stream));
    return event;
  }

  // The second stream has the higher priority: its work is short, and uses few multiprocessors.
  void make_side_stream() {
    int least = 0, greatest = 0;
    MOEBIUS_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    MOEBIUS_CUDA(cudaStreamCreateWithPriority(&side_stream, cudaStreamNonBlocking, greatest));
    for (cudaEvent_t* event : {&forked, &joined}) MOEBIUS_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }

  void end_scope(Timed scope) noexcept;

  // Adds the times of scopes to their traces. REQUIRES: the work has ended.
  void settle() {
    const std::vector<Timed> ended = std::exchange(timed, {});
    for (const Timed& t : ended) {
      float begin_ms = 0, length_ms = 0;
      MOEBIUS_CUDA(cudaEventElapsedTime(&begin_ms, origin, t.begin));
      MOEBIUS_CUDA(cudaEventElapsedTime(&length_ms, t.begin, t.end));
      const double begin_us = origin_us + 1e3 * begin_ms;
      if (t.cost)
        t.trace->add(t.name.c_str(), begin_us, 1e3 * length_ms, *t.cost);
      else
        t.trace->add_phase(t.name, begin_us, 1e3 * length_ms);
      free_events.insert(free_events.end(), {t.begin, t.end});
    }
  }
};

struct AcceleratorAccess {
  static auto& of(Accelerator& a) { return *a.impl_; }
};

namespace {

// Polls without a pause while the answer may come within microseconds, then less often.
void wait_guarded(cudaStream_t stream, const GpuWaitWatchdog& guard) {
  constexpr double kSpinS = 1e-3, kLookS = 5e-3;
  const double begin = now_us();
  double looked_s = 0;
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) {
      check_cuda(status, "cudaStreamQuery");
      if (guard.ended) guard.ended();
      return;
    }
    const double waited_s = (now_us() - begin) * 1e-6;
    if (waited_s - looked_s > kLookS) {
      guard.check(waited_s);
      looked_s = waited_s;
    }
    if (waited_s > kSpinS) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

namespace {

// Refuses a GPU on which the portable kernels do not load, before anything is allocated there.
void check_loads(const GpusFound& found, int index) {
  const cudaError_t status = load_portable_kernel();
  if (status == cudaSuccess) return;
  const std::string why = why_not_loaded(found, index, cudaGetErrorName(status));
  if (!why.empty()) cudaGetLastError();
  MOEBIUS_CHECK(usage, why.empty(), "run.device: {}; or set run.device = \"cpu\"", why);
  check_cuda(status, "cudaFuncGetAttributes");
}

}  // namespace

Accelerator::Accelerator(int index) : impl_(std::make_unique<Impl>()) {
  const GpusFound found = gpus_found();
  const std::string why = why_not_usable(found, index);
  MOEBIUS_CHECK(usage, why.empty(), "run.device: {}; or set run.device = \"cpu\"", why);
  impl_->index = index;
  // It stays the thread's GPU: memory is allocated on the GPU of the thread's last Accelerator.
  MOEBIUS_CUDA(cudaSetDevice(index));
  check_loads(found, index);
  MOEBIUS_CUDA(cudaStreamCreateWithFlags(&impl_->stream, cudaStreamNonBlocking));
}

Accelerator::~Accelerator() {
  cudaStreamSynchronize(impl_->stream);
  states_.clear();
  for (const Timed& t : impl_->timed) impl_->free_events.insert(impl_->free_events.end(), {t.begin, t.end});
  for (cudaEvent_t event : impl_->free_events) cudaEventDestroy(event);
  if (impl_->origin) cudaEventDestroy(impl_->origin);
  if (impl_->forked) cudaEventDestroy(impl_->forked);
  if (impl_->joined) cudaEventDestroy(impl_->joined);
  if (impl_->side_stream) cudaStreamDestroy(impl_->side_stream);
  cudaStreamDestroy(impl_->stream);
}

int Accelerator::count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  cudaGetLastError();
  return 0;
}

bool Accelerator::is_built_in() { return true; }

std::string Accelerator::why_missing() { return why_not_usable(gpus_found(), 0); }

AcceleratorInfo Accelerator::info() const { return describe(impl_->index); }

AcceleratorInfo Accelerator::describe(int index) {
  const cudaDeviceProp p = properties_of(index);
  int driver = 0;
  MOEBIUS_CUDA(cudaDriverGetVersion(&driver));
  const CurrentDevice current(index);
  size_t free = 0, total = 0;
  MOEBIUS_CUDA(cudaMemGetInfo(&free, &total));
  return {.name = p.name,
          .capability_major = p.major,
          .capability_minor = p.minor,
          .num_multiprocessors = p.multiProcessorCount,
          .memory_bytes = static_cast<int64_t>(total),
          .free_bytes = static_cast<int64_t>(free),
          .runtime = cuda_version_text(CUDART_VERSION),
          .driver = cuda_version_text(driver)};
}

void* Accelerator::native_stream() const { return impl_->stream; }

void Accelerator::begin_op(const char* name, bool timed) {
  if (timed) {
    if (!impl_->origin) {
      MOEBIUS_CUDA(cudaEventCreate(&impl_->origin));
      MOEBIUS_CUDA(cudaEventRecord(impl_->origin, impl_->stream));
      MOEBIUS_CUDA(cudaEventSynchronize(impl_->origin));
      impl_->origin_us = now_us();
    }
    impl_->open_ops.push_back(impl_->take_event());
  }
  nvtxRangePushA(name);  // last, so that no range is open after an exception
}

// A scope may end because its body failed. That error is reported, so nothing is thrown here.
void Accelerator::Impl::end_scope(Timed scope) noexcept {
  if (open_ops.empty()) return;
  scope.begin = open_ops.back();
  open_ops.pop_back();
  try {
    scope.end = take_event();
    timed.push_back(scope);
  } catch (...) {
    cudaEventDestroy(scope.begin);
  }
}

void Accelerator::end_op(const char* name, Trace* trace, Cost cost) {
  nvtxRangePop();
  if (trace) impl_->end_scope({.trace = trace, .name = name, .cost = cost});
}
void Accelerator::end_phase(const std::string& name, Trace* trace) {
  nvtxRangePop();
  if (trace) impl_->end_scope({.trace = trace, .name = name});
}

CudaGraph::CudaGraph(Accelerator& a, GraphCapture& capture, const std::function<void()>& body) {
  const cudaStream_t stream = static_cast<cudaStream_t>(a.native_stream());
  cudaGraph_t graph = nullptr;
  MOEBIUS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  a.capture_ = &capture;
  const std::shared_ptr<void> end_of_capture(nullptr, [&a](void*) { a.capture_ = nullptr; });
  try {
    body();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  MOEBIUS_CUDA(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  cudaGraphExec_t exec = nullptr;
  cudaError_t status = cudaGraphGetNodes(graph, nullptr, &nodes);
  if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(status, "cudaGraphInstantiate");
  num_nodes_ = static_cast<int64_t>(nodes);
  graph_ = std::shared_ptr<void>(exec, [](void* e) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e)); });
}

void CudaGraph::replay(Accelerator& a) const {
  MOEBIUS_CUDA(
      cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_.get()), static_cast<cudaStream_t>(a.native_stream())));
}

void run_on_side_stream(Accelerator& a, const std::function<void()>& body) {
  auto& impl = AcceleratorAccess::of(a);
  if (!impl.side_stream) impl.make_side_stream();
  MOEBIUS_CUDA(cudaEventRecord(impl.forked, impl.stream));
  MOEBIUS_CUDA(cudaStreamWaitEvent(impl.side_stream, impl.forked, 0));
  std::swap(impl.stream, impl.side_stream);
  const std::shared_ptr<void> back(nullptr, [&impl](void*) { std::swap(impl.stream, impl.side_stream); });
  body();
  MOEBIUS_CUDA(cudaEventRecord(impl.joined, impl.stream));
}

void join_side_stream(Accelerator& a) {
  auto& impl = AcceleratorAccess::of(a);
  MOEBIUS_CUDA(cudaStreamWaitEvent(impl.stream, impl.joined, 0));
}

void run_on_stream(Accelerator& a, void* native_stream, const std::function<void()>& body) {
  auto& impl = AcceleratorAccess::of(a);
  const cudaStream_t own = std::exchange(impl.stream, static_cast<cudaStream_t>(native_stream));
  const std::shared_ptr<void> back(nullptr, [&impl, own](void*) { impl.stream = own; });
  body();
}

void GpuEvent::record(Accelerator& accelerator) {
  if (!event_) {
    cudaEvent_t event;
    MOEBIUS_CUDA(cudaEventCreate(&event));
    event_ = std::shared_ptr<void>(event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
  }
  MOEBIUS_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event_.get()), AcceleratorAccess::of(accelerator).stream));
}

double GpuEvent::seconds_since(const GpuEvent& earlier) const {
  float ms = 0;
  MOEBIUS_CUDA(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(earlier.event_.get()),
                                    static_cast<cudaEvent_t>(event_.get())));
  return 1e-3 * ms;
}

namespace cuda {

void* allocate(int64_t num_bytes) {
  void* p = nullptr;
  size_t free = 0, total = 0;
  MOEBIUS_CUDA(cudaMemGetInfo(&free, &total));
  // More than the GPU has is not asked for: the driver may first use up the host's memory for its tables.
  const cudaError_t status =
      static_cast<size_t>(num_bytes) > total ? cudaErrorMemoryAllocation : cudaMalloc(&p, num_bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory(
        fmt::format("out of device memory: {:.3f} GiB were requested in one piece, {:.3f} of {:.3f} GiB are free; "
                    "stop other programs on this GPU, or compute with smaller shapes",
                    num_bytes / 1073741824.0, free / 1073741824.0, total / 1073741824.0));
  }
  check_cuda(status, "cudaMalloc");
  MOEBIUS_CUDA(cudaMemset(p, 0, num_bytes));
  MOEBIUS_CUDA(cudaDeviceSynchronize());
  return p;
}

void release(void* data) noexcept { cudaFree(data); }

void* allocate_pinned(int64_t num_bytes) {
  void* p = nullptr;
  const cudaError_t status = cudaMallocHost(&p, num_bytes);
  if (is_refused_pinning(status)) {
    cudaGetLastError();
    throw OutOfPinnedMemory(num_bytes, "for copies to and from a GPU",
                            std::string("cudaMallocHost: ") + cudaGetErrorString(status));
  }
  check_cuda(status, "cudaMallocHost");
  std::memset(p, 0, num_bytes);
  return p;
}

void release_pinned(void* data) noexcept { cudaFreeHost(data); }

void copy_to_device(Accelerator& a, void* to, const void* from, int64_t num_bytes) {
  MOEBIUS_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(a.native_stream())));
}

void copy_to_host(Accelerator& a, void* to, const void* from, int64_t num_bytes) {
  MOEBIUS_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(a.native_stream())));
}

void synchronize(Accelerator& a) {
  auto& impl = AcceleratorAccess::of(a);
  const GpuWaitWatchdog& guard = a.state<GpuWaitWatchdog>();
  if (guard.check)
    wait_guarded(impl.stream, guard);
  else
    MOEBIUS_CUDA(cudaStreamSynchronize(impl.stream));
  impl.settle();
}

double time_ms(Accelerator& a, const std::function<void()>& body) {
  auto& impl = AcceleratorAccess::of(a);
  const cudaEvent_t begin = impl.take_event();
  try {
    body();
  } catch (...) {
    impl.free_events.push_back(begin);
    throw;
  }
  const cudaEvent_t end = impl.take_event();
  synchronize(a);
  float ms = 0;
  MOEBIUS_CUDA(cudaEventElapsedTime(&ms, begin, end));
  impl.free_events.insert(impl.free_events.end(), {begin, end});
  return ms;
}

}  // namespace cuda

}  // namespace moebius
