// A pipeline of work on data in host memory. Each job copies its data to memory of the device, works on it there, and
// copies results back. Copies in both directions and the work have streams of their own, so the three parts of
// different jobs overlap with each other, and with other work of the device. Jobs take turns with slots, which are
// memory of the device.
//   cpu   A job runs when it is waited for, the latest time at which a GPU might run it. So a missing wait changes
//         numbers on the CPU too.
//   cuda  Events between streams order the parts. They may be captured in a CudaGraph, and the host never waits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.h"
#include "device/side_copies.h"

namespace moebius {

struct StreamedJob {
  int slot = 0;
  std::vector<SideCopies::Copy> in, out;
  std::function<void(Stream&)> work;  // with a stream of the same device; it must not allocate on the step stack
};

class StreamedWork {
 public:
  // Returns a pipeline on the stream's device, the CPU or a GPU. On a GPU this creates streams and events.
  // REQUIRES: no CUDA graph is being captured.
  static std::unique_ptr<StreamedWork> make(const Stream& s, int num_slots, int64_t num_jobs);
  virtual ~StreamedWork() = default;

  // Starts all jobs, in this order. They wait for all work of s so far. `jobs` must live until end().
  virtual void begin(Stream& s, const std::vector<StreamedJob>& jobs) = 0;
  // Makes work of s from now on wait for the work of jobs [0, end), but not for their copies to the host.
  virtual void wait(Stream& s, int64_t end) = 0;
  // Makes work of s from now on wait for all of the jobs. Each begin() has an end(), in the same capture.
  virtual void end(Stream& s) = 0;
  // Returns the time from the beginning of the first copy to the end of the last one, of the last jobs that ended.
  // REQUIRES: the device has ended them (synchronize()).
  virtual double seconds() const = 0;
};

namespace cuda {
std::unique_ptr<StreamedWork> make_streamed_work(Accelerator& a, int num_slots, int64_t num_jobs);
}  // namespace cuda

}  // namespace moebius
