// Sampling on the GPU, so that it can start the next pass while the host reads the ids of the previous one.
#pragma once

#include "device/gpu_mark.h"
#include "memory/plan.h"
#include "ops/draw/draw.h"

namespace moebius {

class DeviceDraws {
 public:
  void declare(MemoryPlan& plan);
  void bind(int64_t sequences);  // call it after the plan's bind(), with a GPU

  // Copies the rule of the passes that follow to the device. REQUIRES: no pass that reads the rule before is running.
  void set_rule(Stream& s, const DrawRule& rule);
  // The op of a pass with these logits, whose tokens and positions are in device memory. It is the same in each pass,
  // as a CUDA graph needs it.
  DrawTokens op(Tensor logits_NV, Tensor token_N, Tensor pos_N) const;
  // Called after each pass of a series was launched, with its number.
  void launched(Accelerator& gpu, int64_t pass) { marks_[pass % 2].set(gpu); }
  // Waits for a pass, the last one or the one before it. After that id() returns its draws, until two more have begun.
  void wait(int64_t pass) const { marks_[pass % 2].wait(); }
  // Returns the id of row n of num_rows, sampled after the token at this position; -1 if its logits were not finite.
  int32_t id(int64_t n, int64_t num_rows, int64_t pos) const;

 private:
  Tensor rule_;         // a DrawRule in device memory
  HostBuffer of_host_;  // a DrawRule, then ids, i32 [2, sequences]
  GpuMark marks_[2];
};

}  // namespace moebius
