// Access to an engine for tests: the end of a step after passes that a test ran by itself, and the step stack's use.
#pragma once

#include "engine/engine.h"

namespace moebius {

struct EngineTestAccess {
  // Reduces and clips gradients and runs the optimizer, eagerly. All ranks call it together.
  static void optimizer_step(Engine& engine, int64_t step, double lr) {
    Stream s = engine.stream();
    engine.batches_->set_lr_and_step(step, lr);
    engine.batches_->upload(s, 0, 1);  // read_metrics waits for it
    engine.reduce(s);
    engine.update(s, engine.plan_.stack(), engine.batches_->on_device(0).lr_and_step_2());
    engine.read_metrics();
  }
  // Returns the high-water mark of the step stack, in bytes.
  static int64_t stack_high_water(Engine& engine) { return engine.plan_.stack().high_water(); }
};

}  // namespace moebius
