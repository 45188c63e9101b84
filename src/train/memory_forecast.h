// Predicts the peak memory of a run before its first step, and compares it with the measured peak after the last step.
#pragma once

#include "checkpoint/store.h"
#include "comm/control.h"
#include "core/log.h"
#include "train/host_memory.h"

namespace moebius {

class MemoryForecast {
 public:
  MemoryForecast(Engine& engine, Control& control, Log& log) : engine_(engine), control_(control), log_(log) {}

  // Logs the prediction: for the GPU if there is one, else for the process. Allocates the host
  // buffer that saves of a GPU use.
  // Throws Error{usage} when the host does not have the memory of plan, snapshot and rows of experts beyond
  // their budget. All ranks call it together.
  void predict(CheckpointStore& store, bool async_save);
  void compare();  // logs the prediction and the measured peak
  // Memory of the GPU or of the process; valid after predict().
  int64_t predicted_bytes() const { return predicted_bytes_; }

 private:
  void predict_gpu(const HostMemory& host);
  void predict_process(const HostMemory& host);

  Engine& engine_;
  Control& control_;
  Log& log_;
  int64_t predicted_bytes_ = 0;
};

}  // namespace moebius
