#include "device/streamed_work.h"

#include <cstring>

#include "core/error.h"

namespace moebius {
namespace {

// Jobs run when a wait needs them. Their results are copied back when the slot is needed again. Tests then show missing
// waits, since numbers change.
class LateWork final : public StreamedWork {
 public:
  explicit LateWork(int num_slots) : leaving_(static_cast<size_t>(num_slots)) {}

  void begin(Stream&, const std::vector<StreamedJob>& jobs) override {
    jobs_ = &jobs;
    num_done_ = 0;
    busy_us_ = 0;
    for (const StreamedJob*& job : leaving_) job = nullptr;
  }
  void wait(Stream& s, int64_t end) override {
    const double begin = now_us();
    for (; jobs_ && num_done_ < end; ++num_done_) run(s, (*jobs_)[static_cast<size_t>(num_done_)]);
    busy_us_ += now_us() - begin;
  }
  void end(Stream& s) override {
    if (!jobs_) return;
    wait(s, std::ssize(*jobs_));
    const double begin = now_us();
    for (const StreamedJob*& job : leaving_) leave(job);
    busy_us_ += now_us() - begin;
    jobs_ = nullptr;
  }
  double seconds() const override { return busy_us_ * 1e-6; }

 private:
  void run(Stream& s, const StreamedJob& job) {
    const StreamedJob*& before = leaving_[static_cast<size_t>(job.slot)];
    leave(before);
    for (const SideCopies::Copy& c : job.in) std::memcpy(c.device, c.host, static_cast<size_t>(c.num_bytes));
    job.work(s);
    before = &job;
  }
  static void leave(const StreamedJob*& job) {
    if (!job) return;
    for (const SideCopies::Copy& c : job->out) std::memcpy(c.host, c.device, static_cast<size_t>(c.num_bytes));
    job = nullptr;
  }

  const std::vector<StreamedJob>* jobs_ = nullptr;
  int64_t num_done_ = 0;
  double busy_us_ = 0;
  std::vector<const StreamedJob*> leaving_;  // by slot: the job whose results have not been copied back
};

}  // namespace

std::unique_ptr<StreamedWork> StreamedWork::make(const Stream& s, int num_slots, int64_t num_jobs) {
  if (s.device() == DeviceKind::cuda) return cuda::make_streamed_work(s.accelerator(), num_slots, num_jobs);
  MOEBIUS_ASSERT(s.device() == DeviceKind::cpu);
  return std::make_unique<LateWork>(num_slots);
}

}  // namespace moebius
