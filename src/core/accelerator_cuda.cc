#include "core/accelerator.h"

#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <thread>
#include <vector>

#include "core/cuda.h"
#include "core/out_of_memory.h"
#include "core/wait_guard.h"

namespace moebius {
namespace {

// The kernels are built for this and no other (wgmma and TMA are not forward compatible).
constexpr int kCapabilityMajor = 9, kCapabilityMinor = 0;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

cudaDeviceProp properties_of(int index) {
  cudaDeviceProp p;
  MOEBIUS_CUDA(cudaGetDeviceProperties(&p, index));
  return p;
}

std::string why_missing_of(int index) {
  const cudaDeviceProp p = properties_of(index);
  if (p.major == kCapabilityMajor && p.minor == kCapabilityMinor) return "";
  return fmt::format("the GPU is {} (compute capability {}.{}), and the kernels are built for {}.{} (Hopper)", p.name,
                     p.major, p.minor, kCapabilityMajor, kCapabilityMinor);
}

// Another GPU is the thread's current one for a while.
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
  const char* name;
  Cost cost;
  cudaEvent_t begin, end;
};

}  // namespace

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  if (status == cudaErrorMemoryAllocation) {
    throw OutOfMemory(
        fmt::format("out of device memory in {}: the libraries' own needs did not fit beside the plan; use a smaller "
                    "train.micro_batch, train.seq_len or model (--batch, --seq-len; bench: --shape), or end what else "
                    "uses this GPU",
                    call));
  }
  MOEBIUS_FAIL(internal, "CUDA: {}: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status));
}

struct Accelerator::Impl {
  int index = 0;
  cudaStream_t stream = nullptr;
  std::vector<cudaEvent_t> free_events;
  std::vector<cudaEvent_t> open_ops;
  std::vector<Timed> timed;      // ended on the host, not yet read
  cudaEvent_t origin = nullptr;  // the trace's zero on the device
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

  // Times of ops become known when their work has ended.
  void settle() {
    for (const Timed& t : timed) {
      float begin_ms = 0, length_ms = 0;
      MOEBIUS_CUDA(cudaEventElapsedTime(&begin_ms, origin, t.begin));
      MOEBIUS_CUDA(cudaEventElapsedTime(&length_ms, t.begin, t.end));
      t.trace->add(t.name, origin_us + 1e3 * begin_ms, 1e3 * length_ms, t.cost);
      free_events.insert(free_events.end(), {t.begin, t.end});
    }
    timed.clear();
  }
};

struct AcceleratorAccess {
  static Accelerator::Impl& of(Accelerator& a) { return *a.impl_; }
};

namespace {

// Asks at once while the answer may come within microseconds, then less often.
void wait_guarded(cudaStream_t stream, const WaitGuard& guard) {
  constexpr double kSpinS = 1e-3, kLookS = 5e-3;
  const double begin = now_us();
  double looked_s = 0;
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) return check_cuda(status, "cudaStreamQuery");
    const double waited_s = (now_us() - begin) * 1e-6;
    if (waited_s - looked_s > kLookS) {
      guard.look(waited_s);
      looked_s = waited_s;
    }
    if (waited_s > kSpinS) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

Accelerator::Accelerator(int index) : impl_(std::make_unique<Impl>()) {
  const bool exists = index >= 0 && index < count();
  MOEBIUS_CHECK(usage, count() == 0 || exists, "run.device: expected a GPU with index {}; this machine has {}", index,
                count());
  const std::string why = exists ? why_missing_of(index) : why_missing();
  MOEBIUS_CHECK(usage, why.empty(), "run.device: {}; set run.device = \"cpu\"", why);
  impl_->index = index;
  // For this thread, and for good: memory is allocated on the GPU of the thread's last Accelerator.
  MOEBIUS_CUDA(cudaSetDevice(index));
  MOEBIUS_CUDA(cudaStreamCreateWithFlags(&impl_->stream, cudaStreamNonBlocking));
}

Accelerator::~Accelerator() {
  cudaStreamSynchronize(impl_->stream);
  states_.clear();
  for (const Timed& t : impl_->timed) impl_->free_events.insert(impl_->free_events.end(), {t.begin, t.end});
  for (cudaEvent_t event : impl_->free_events) cudaEventDestroy(event);
  if (impl_->origin) cudaEventDestroy(impl_->origin);
  cudaStreamDestroy(impl_->stream);
}

int Accelerator::count() {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  cudaGetLastError();
  return 0;
}

bool Accelerator::is_built_in() { return true; }

std::string Accelerator::why_missing() {
  int n = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&n); status != cudaSuccess || n == 0) {
    cudaGetLastError();
    return fmt::format("no GPU can be used on this machine ({})",
                       status == cudaSuccess ? "the driver knows none" : cudaGetErrorString(status));
  }
  return why_missing_of(0);
}

AcceleratorInfo Accelerator::info() const { return describe(impl_->index); }

AcceleratorInfo Accelerator::describe(int index) {
  const cudaDeviceProp p = properties_of(index);
  int runtime = 0, driver = 0;
  MOEBIUS_CUDA(cudaRuntimeGetVersion(&runtime));
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
          .runtime = version_text(runtime),
          .driver = version_text(driver)};
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
  nvtxRangePushA(name);  // last: who throws opens no range
}

void Accelerator::end_op(const char* name, Trace* trace, Cost cost) {
  nvtxRangePop();
  if (!trace) return;
  if (impl_->open_ops.empty()) return;
  const cudaEvent_t begin = impl_->open_ops.back();
  impl_->open_ops.pop_back();
  try {
    impl_->timed.push_back({trace, name, cost, begin, impl_->take_event()});
  } catch (const Error&) {
    cudaEventDestroy(begin);  // an OpScope ends here, maybe because its op failed: that error is the one to tell
  }
}

void Accelerator::begin_range(const char* name) { nvtxRangePushA(name); }
void Accelerator::end_range() { nvtxRangePop(); }

Recording::Recording(Accelerator& a, const std::function<void()>& body) {
  const cudaStream_t stream = static_cast<cudaStream_t>(a.native_stream());
  cudaGraph_t graph = nullptr;
  MOEBIUS_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
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

void Recording::replay(Accelerator& a) const {
  MOEBIUS_CUDA(
      cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_.get()), static_cast<cudaStream_t>(a.native_stream())));
}

void Moment::take(Accelerator& accelerator) {
  if (!event_) {
    cudaEvent_t event;
    MOEBIUS_CUDA(cudaEventCreate(&event));
    event_ = std::shared_ptr<void>(event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
  }
  MOEBIUS_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event_.get()), AcceleratorAccess::of(accelerator).stream));
}

double Moment::seconds_since(const Moment& earlier) const {
  float ms = 0;
  MOEBIUS_CUDA(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(earlier.event_.get()),
                                    static_cast<cudaEvent_t>(event_.get())));
  return 1e-3 * ms;
}

namespace cuda {

void* allocate(int64_t num_bytes) {
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, num_bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    throw OutOfMemory(
        fmt::format("out of device memory: {:.3f} GiB were asked for in one piece, {:.3f} of {:.3f} GiB are free; use "
                    "a smaller train.micro_batch, train.seq_len or model (--batch, --seq-len; bench: --shape), or end "
                    "what else uses this GPU",
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
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw OutOfMemory(fmt::format(
        "out of pinned host memory: {:.3f} GiB were asked for in one piece, through which a GPU copies; the "
        "memory of the GPU is not what lacks: raise the memory limit of this container or group, end what "
        "else holds host memory, or use a smaller train.micro_batch",
        num_bytes / 1073741824.0));
  }
  check_cuda(status, "cudaMallocHost");
  std::memset(p, 0, num_bytes);
  return p;
}

void release_pinned(void* data) noexcept { cudaFreeHost(data); }

void copy_to_device(Accelerator& a, void* to, const void* from, int64_t num_bytes) {
  MOEBIUS_CUDA(
      cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(a.native_stream())));
}

void copy_to_host(Accelerator& a, void* to, const void* from, int64_t num_bytes) {
  MOEBIUS_CUDA(
      cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(a.native_stream())));
}

void synchronize(Accelerator& a) {
  auto& impl = AcceleratorAccess::of(a);
  const WaitGuard& guard = a.state<WaitGuard>();
  if (guard.look)
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
