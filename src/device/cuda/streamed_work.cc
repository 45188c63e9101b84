#include "device/streamed_work.h"

#include "device/cuda/cuda.h"
#include "device/side_stream.h"

namespace moebius::cuda {
namespace {

cudaStream_t make_stream(bool is_urgent) {
  int least = 0, greatest = 0;
  MOEBIUS_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  MOEBIUS_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, is_urgent ? greatest : least));
  return stream;
}

cudaEvent_t make_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  MOEBIUS_CUDA(cudaEventCreateWithFlags(&event, flags));
  return event;
}

// The work has the higher priority in eager steps: it is short, and the bus must not wait for it. A graph runs with the
// priority of the stream that launches it.
class GpuWork final : public StreamedWork {
 public:
  GpuWork(Accelerator& a, int num_slots, int64_t num_jobs)
      : accelerator_(a),
        forked_(make_event()),
        ended_(make_event()),
        first_copy_(make_event(cudaEventDefault)),
        last_copy_(make_event(cudaEventDefault)) {
    for (cudaStream_t* stream : {&arriving_, &working_, &leaving_}) *stream = make_stream(stream == &working_);
    for (int i = 0; i < num_slots; ++i) {
      arrived_.push_back(make_event());
      freed_.push_back(make_event());
    }
    for (int64_t i = 0; i < num_jobs; ++i) worked_.push_back(make_event());
  }
  ~GpuWork() override {
    for (const auto* events : {&arrived_, &freed_, &worked_})
      for (cudaEvent_t event : *events) cudaEventDestroy(event);
    for (cudaEvent_t event : {forked_, ended_, first_copy_, last_copy_}) cudaEventDestroy(event);
    for (cudaStream_t stream : {arriving_, working_, leaving_}) cudaStreamDestroy(stream);
  }

  void begin(Stream& s, const std::vector<StreamedJob>& jobs) override {
    MOEBIUS_ASSERT(jobs.size() == worked_.size());
    num_waited_ = 0;
    MOEBIUS_CUDA(cudaEventRecord(forked_, cuda_stream(s)));
    for (cudaStream_t stream : {arriving_, working_, leaving_}) MOEBIUS_CUDA(cudaStreamWaitEvent(stream, forked_, 0));
    mark(s, first_copy_, arriving_);
    std::vector<bool> used(arrived_.size());
    for (size_t i = 0; i < jobs.size(); ++i) {
      const auto slot = static_cast<size_t>(jobs[i].slot);
      if (used[slot]) MOEBIUS_CUDA(cudaStreamWaitEvent(arriving_, freed_[slot], 0));
      used[slot] = true;
      start(s, jobs[i], slot, worked_[i]);
    }
    mark(s, last_copy_, leaving_);
  }

  void wait(Stream& s, int64_t end) override {
    if (end <= num_waited_) return;
    num_waited_ = end;
    MOEBIUS_CUDA(cudaStreamWaitEvent(cuda_stream(s), worked_[static_cast<size_t>(end - 1)], 0));
  }

  void end(Stream& s) override {
    wait(s, std::ssize(worked_));
    for (cudaStream_t stream : {arriving_, leaving_}) {
      MOEBIUS_CUDA(cudaEventRecord(ended_, stream));
      MOEBIUS_CUDA(cudaStreamWaitEvent(cuda_stream(s), ended_, 0));
    }
  }

  double seconds() const override {
    float ms = 0;
    MOEBIUS_CUDA(cudaEventElapsedTime(&ms, first_copy_, last_copy_));
    return 1e-3 * ms;
  }

 private:
  // An event that a captured graph records for the host to read.
  static void mark(const Stream& s, cudaEvent_t event, cudaStream_t stream) {
    MOEBIUS_CUDA(
        cudaEventRecordWithFlags(event, stream, s.capture() ? cudaEventRecordExternal : cudaEventRecordDefault));
  }

  void start(Stream& s, const StreamedJob& job, size_t slot, cudaEvent_t worked) {
    for (const SideCopies::Copy& c : job.in)
      MOEBIUS_CUDA(cudaMemcpyAsync(c.device, c.host, c.num_bytes, cudaMemcpyHostToDevice, arriving_));
    MOEBIUS_CUDA(cudaEventRecord(arrived_[slot], arriving_));
    MOEBIUS_CUDA(cudaStreamWaitEvent(working_, arrived_[slot], 0));
    run_on_stream(accelerator_, working_, [&] { job.work(s); });
    MOEBIUS_CUDA(cudaEventRecord(worked, working_));
    MOEBIUS_CUDA(cudaStreamWaitEvent(leaving_, worked, 0));
    for (const SideCopies::Copy& c : job.out)
      MOEBIUS_CUDA(cudaMemcpyAsync(c.host, c.device, c.num_bytes, cudaMemcpyDeviceToHost, leaving_));
    MOEBIUS_CUDA(cudaEventRecord(freed_[slot], leaving_));
  }

  Accelerator& accelerator_;
  cudaStream_t arriving_ = nullptr, working_ = nullptr, leaving_ = nullptr;
  cudaEvent_t forked_, ended_, first_copy_, last_copy_;
  std::vector<cudaEvent_t> arrived_, freed_;  // of each slot
  std::vector<cudaEvent_t> worked_;           // of each job
  int64_t num_waited_ = 0;                    // jobs that the device's stream waits for already
};

}  // namespace

std::unique_ptr<StreamedWork> make_streamed_work(Accelerator& a, int num_slots, int64_t num_jobs) {
  return std::make_unique<GpuWork>(a, num_slots, num_jobs);
}

}  // namespace moebius::cuda
