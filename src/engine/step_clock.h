// Measures the time of the parts of a training step, by the host's clock or by that of the GPU.
#pragma once

#include "core/trace.h"
#include "device/accelerator.h"

namespace moebius {

struct StepTimes {
  double load_s = 0;  // time of the host in the batch source
  // Time of forward and backward passes. On a GPU it starts with the first micro-batch, and includes waits for more.
  double passes_s = 0;
  double optimizer_s = 0;  // time of reduction and update; without an update that stays pending
  // Time in which an update moved masters and moments between host and device, of the update that ran in this step
  // (with optimizer.offload). 0: none ran.
  double states_s = 0;
  bool states_overlap = false;  // true if the update overlapped with passes; states_s then includes its waits
};

class StepClock {
 public:
  void begin_step() {
    times_ = {};
    begin_us_ = now_us();
  }
  template <class Body>
  void load(Body&& body) {
    const double begin = now_us();
    body();
    times_.load_s += (now_us() - begin) * 1e-6;
  }
  void begin_passes(Accelerator* gpu) {  // of the first micro-batch; gpu: null on the CPU
    if (gpu) began_.record(*gpu);
  }
  void end_passes(Accelerator* gpu) {
    passed_us_ = now_us();
    if (gpu) passed_.record(*gpu);
  }
  void end_update(Accelerator* gpu) {
    updated_us_ = now_us();
    if (gpu) updated_.record(*gpu);
  }
  // After the step's work has ended.
  void read(const Accelerator* gpu) {
    times_.passes_s = gpu ? passed_.seconds_since(began_) : (passed_us_ - begin_us_) * 1e-6 - times_.load_s;
    times_.optimizer_s = gpu ? updated_.seconds_since(passed_) : (updated_us_ - passed_us_) * 1e-6;
  }
  void set_states(double seconds, bool overlap) {
    times_.states_s = seconds;
    times_.states_overlap = overlap;
  }
  const StepTimes& times() const { return times_; }

 private:
  StepTimes times_;
  double begin_us_ = 0, passed_us_ = 0, updated_us_ = 0;
  GpuEvent began_, passed_, updated_;
};

}  // namespace moebius
