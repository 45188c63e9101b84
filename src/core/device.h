// Where things run. A Device allocates; a Stream orders work on a device. Both are passed, never looked up.
//   cpu   work runs at once on the stream's thread pool
//   null  nothing runs, every op is counted: the same code prices a step without memory or time
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/tensor.h"
#include "core/thread_pool.h"
#include "core/trace.h"

namespace moebius {

// Owned memory of a device, aligned to 4096 bytes, zeroed. Null device: no memory, data() is null.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DeviceKind device,
         int64_t num_bytes);  // Error{usage} when the device has not that much, saying how much was asked for
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

class Stream {
 public:
  // pool: CPU threads (any device may use them for host work). trace: where ops are accounted, may be null.
  Stream(DeviceKind device, ThreadPool& pool, Trace* trace = nullptr) : device_(device), pool_(&pool), trace_(trace) {}
  DeviceKind device() const { return device_; }
  ThreadPool& pool() const { return *pool_; }
  Trace* trace() const { return trace_; }

 private:
  DeviceKind device_;
  ThreadPool* pool_;
  Trace* trace_;
};

// An op's entry: counts and times it when the stream traces.
//   OpScope scope(s, "rms_norm_fwd", cost(a));
class OpScope {
 public:
  OpScope(Stream& s, const char* name, Cost cost);
  ~OpScope();
  OpScope(const OpScope&) = delete;

 private:
  Trace* trace_;
  const char* name_;
  Cost cost_;
  double begin_us_ = 0;
};

// Threads this process may run on, by its CPU affinity.
int num_available_cpus();
// Memory that this process may still take: what the machine has available, or less where a control group (v1 or v2)
// limits it; the page cache counts as available. INT64_MAX when nothing says. root stands before /proc and /sys.
int64_t available_memory_bytes(const std::string& root = "");
// Largest resident set of this process so far, in bytes; and the resident set now.
int64_t peak_rss_bytes();
int64_t current_rss_bytes();

}  // namespace moebius
