// An Accelerator is one GPU as an engine uses it:
// its own stream, and the data that ops keep between calls on it.
// In a build without CUDA there is none: count() is 0 and the constructor reports why.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <typeindex>

#include "core/trace.h"

namespace moebius {

class GraphCapture;

struct AcceleratorInfo {
  std::string name;  // "NVIDIA H200"
  int capability_major = 0, capability_minor = 0;
  int num_multiprocessors = 0;
  int64_t memory_bytes = 0, free_bytes = 0;
  std::string runtime, driver;  // CUDA versions, "13.0"
};

class Accelerator {
 public:
  // Throws Error{usage} when there is no such GPU, or when this build's kernels do not run on it.
  // The message names what is missing.
  explicit Accelerator(int index = 0);
  ~Accelerator();
  Accelerator(const Accelerator&) = delete;

  static int count();                // GPUs of this machine that the driver reports
  static bool is_built_in();         // whether this program has the CUDA backend
  static std::string why_missing();  // why the first GPU cannot be used, for messages; empty if it can

  static AcceleratorInfo describe(int index);  // REQUIRES index < count()
  AcceleratorInfo info() const;
  void* native_stream() const;  // cudaStream_t

  // Data that an op keeps between calls on this GPU, such as handles and chosen algorithms.
  // It is constructed at first use and lives as long as this Accelerator.
  template <class T>
  T& state() {
    std::shared_ptr<void>& slot = states_[typeid(T)];
    if (!slot) slot = std::make_shared<T>();
    return *static_cast<T*>(slot.get());
  }

  // Returns the graph for which the work of this GPU's stream is being captured; null when
  // the work runs.
  GraphCapture* capture() const { return capture_; }

  // OpScope and PhaseScope call these.
  void begin_op(const char* name, bool timed);
  void end_op(const char* name, Trace* trace, Cost cost);
  void end_phase(const std::string& name, Trace* trace);  // ends a phase that begin_op began

 private:
  friend struct AcceleratorAccess;
  friend class CudaGraph;
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::map<std::type_index, std::shared_ptr<void>> states_;
  GraphCapture* capture_ = nullptr;
};

// A point in the work of a GPU's stream, timed by the GPU's own clock. It cannot be captured in a CudaGraph.
class GpuEvent {
 public:
  void record(Accelerator& accelerator);                // marks the end of work launched so far; a later call moves it
  double seconds_since(const GpuEvent& earlier) const;  // REQUIRES both recorded, and that the GPU has reached both
 private:
  std::shared_ptr<void> event_;
};

// A CUDA graph: work of a stream that is captured once and replayed as a whole. The work must neither wait nor
// allocate. A replay uses the arguments of the capture, and gives the same bits as running body.
class CudaGraph {
 public:
  CudaGraph() = default;
  // Runs body; its work is captured, not executed. During the call accelerator.capture() is `capture`.
  CudaGraph(Accelerator& accelerator, GraphCapture& capture, const std::function<void()>& body);
  bool empty() const { return !graph_; }
  int64_t num_nodes() const { return num_nodes_; }
  void replay(Accelerator& accelerator) const;

 private:
  std::shared_ptr<void> graph_;
  int64_t num_nodes_ = 0;
};

// The CUDA part of device/device.h; without CUDA each of these throws.
namespace cuda {
void* allocate(int64_t num_bytes);  // zeroed
void release(void* data) noexcept;
void* allocate_pinned(int64_t num_bytes);  // zeroed
void release_pinned(void* data) noexcept;
void copy_to_device(Accelerator& a, void* to, const void* from, int64_t num_bytes);
void copy_to_host(Accelerator& a, void* to, const void* from, int64_t num_bytes);
void synchronize(Accelerator& a);
double time_ms(Accelerator& a, const std::function<void()>& body);
}  // namespace cuda

}  // namespace moebius
