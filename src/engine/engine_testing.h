// Tests need two things of an engine that programs do not: its end of a step by itself, after passes
// that a test ran one by one, and the use of its step stack.
#pragma once

#include "engine/engine.h"

namespace moebius {

struct EngineTestAccess {
  // Reduces, clips and updates, eager. All ranks call it together.
  static void optimizer_step(Engine& engine, int64_t step, double lr) {
    Stream s = engine.stream();
    engine.batches_->set_lr_and_step(step, lr);
    engine.batches_->upload(s, 0, 1);  // read_metrics waits for it
    engine.reduce(s);
    engine.update(s, engine.plan_.stack(), engine.batches_->on_device(0).lr_and_step_2());
    engine.read_metrics();
  }
  // Returns the most bytes of the step stack that were in use at a time.
  static int64_t stack_high_water(Engine& engine) { return engine.plan_.stack().high_water(); }
};

}  // namespace moebius
