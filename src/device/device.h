// Buffers allocate memory on a device; a Stream orders work on a device. Both are passed, never looked up.
//   cpu   work runs at once on the stream's thread pool
//   cuda  work is ordered on the stream of an Accelerator, and is complete after synchronize()
//   null  nothing runs, but every op is counted: the same code measures a step without its memory or time
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "core/thread_pool.h"
#include "core/trace.h"

namespace moebius {

class Accelerator;

// Owned, zeroed memory of a device, aligned to at least 256 bytes. On the null device data() is null.
class Buffer {
 public:
  Buffer() = default;
  // Throws Error{usage} with the number of bytes if the device has too little memory.
  Buffer(DeviceKind device, int64_t num_bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  void* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    std::swap(device_, other.device_);
  }
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
  DeviceKind device_ = DeviceKind::null;
};

// The host's side of a CUDA graph. A replay runs no host code, so host code that must run after each replay, such as
// the counting of bytes, is registered here during the capture.
class GraphCapture {
 public:
  GraphCapture() = default;
  GraphCapture(const GraphCapture&) = delete;
  void after_replay(std::function<void()> body) { after_replay_.push_back(std::move(body)); }
  void replayed() const {
    for (const auto& body : after_replay_) body();
  }
  // Returns a slot for data that `participant` keeps for this capture; empty at first.
  std::shared_ptr<void>& state_of(const void* participant) { return states_[participant]; }

 private:
  std::vector<std::function<void()>> after_replay_;
  std::map<const void*, std::shared_ptr<void>> states_;
};

class Stream {
 public:
  // A stream of the CPU, or of the null device.
  // A null stream measures for `target`: scratch has the sizes of target.
  // pool: CPU threads, which any device may use for host work. trace: where ops are counted;
  // may be null.
  Stream(DeviceKind device, ThreadPool& pool, Trace* trace = nullptr, DeviceKind target = DeviceKind::cpu)
      : device_(device), target_(device == DeviceKind::null ? target : device), pool_(&pool), trace_(trace) {}
  // The stream of a GPU.
  Stream(Accelerator& accelerator, ThreadPool& pool, Trace* trace = nullptr)
      : device_(DeviceKind::cuda), target_(DeviceKind::cuda), pool_(&pool), trace_(trace), accelerator_(&accelerator) {}
  DeviceKind device() const { return device_; }
  DeviceKind target() const { return target_; }
  ThreadPool& pool() const { return *pool_; }
  Trace* trace() const { return trace_; }
  Accelerator& accelerator() const;  // throws Error{internal} on another device
  // Returns the graph that this stream's work is being captured for; null when the work runs.
  GraphCapture* capture() const { return capture_; }
  void set_capture(GraphCapture* capture) { capture_ = capture; }

 private:
  DeviceKind device_, target_;
  ThreadPool* pool_;
  Trace* trace_;
  Accelerator* accelerator_ = nullptr;
  GraphCapture* capture_ = nullptr;
};

// Copies between host memory and memory of the stream's device, in the order of the stream's work.
// copy_to_device may return before `from` was read when `from` is pinned memory (HostBuffer).
// copy_to_host returns when `to` is filled; with CopyWait::async, `to` is filled after
// synchronize(). On the null device nothing happens.
void copy_to_device(Stream& s, void* to, const void* from, int64_t num_bytes);
enum class CopyWait { done, async };
void copy_to_host(Stream& s, void* to, const void* from, int64_t num_bytes, CopyWait wait = CopyWait::done);
// Waits until all work of the stream has ended.
void synchronize(Stream& s);
// Runs body, waits for its work, and returns the milliseconds that it took by the device's clock.
double time_on_device(Stream& s, const std::function<void()>& body);

// Zeroed host memory that the device copies from and to at full speed:
// pinned for a GPU, ordinary otherwise.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(DeviceKind device, int64_t num_bytes);
  void* data() const { return data_.get(); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<void> data_;
  int64_t num_bytes_ = 0;
};

// Marks an op: counts and times it if the stream has a trace, and names it for NVIDIA's profilers (NVTX) on a GPU.
//   OpScope scope(s, "rms_norm_fwd", cost(a));
class OpScope {
 public:
  OpScope(Stream& s, const char* name, Cost cost);
  ~OpScope();
  OpScope(const OpScope&) = delete;

 private:
  Stream& s_;
  const char* name_;
  Cost cost_;
  double begin_us_ = 0;
};

// Marks a part of a step (a pass, a layer) in the stream's trace and in NVIDIA's profilers.
class PhaseScope {
 public:
  PhaseScope(Stream& s, const char* name, int64_t index = -1);  // "forward 3"; a negative index is not shown
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;

 private:
  Stream& s_;
  std::string name_;
  double begin_us_ = 0;
};

// Returns the number of threads that this process may run on, by its CPU affinity.
int num_available_cpus();
// Returns the bytes of memory that this process may still allocate: what the machine has available,
// or less where a control group (v1 or v2) limits it. The page cache counts as available.
// INT64_MAX when nothing gives a limit. `root` is put before /proc and /sys.
int64_t available_memory_bytes(const std::string& root = "");
// Return the peak and the current resident set size of this process, in bytes.
int64_t peak_rss_bytes();
int64_t current_rss_bytes();

}  // namespace moebius
